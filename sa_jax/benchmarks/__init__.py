"""Speed of the attention functions beside what a user would pick instead."""
