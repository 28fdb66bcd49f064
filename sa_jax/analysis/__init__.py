"""What the paper claims of reach, small worlds and mixing, measured on the patterns themselves."""
