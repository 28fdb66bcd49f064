"""Puts result files together into one page, the paper's figures beside ours.

    python -m experiments.report --results=results --workdir=runs/report

Reads all result.json below --results, with the tables and figures beside them, and writes report.md
and report.html, which needs no other file.
"""

from pathlib import Path

from absl import app, flags

from sa_jax.report import page

_RESULTS = flags.DEFINE_multi_string('results', ['results'], 'Folders; give it several times.')
_WORKDIR = flags.DEFINE_string('workdir', 'runs/report', 'Receives the two files.')


def main(argv: list[str]) -> None:
    """Collects, writes the page, and prints what was left out."""
    if len(argv) > 1:
        raise app.UsageError(f'Unexpected arguments: {" ".join(argv[1:])}')
    workdir = Path(_WORKDIR.value).expanduser()
    try:
        found, messages = page.collect([Path(x).expanduser() for x in _RESULTS.value])
        workdir.mkdir(parents=True, exist_ok=True)
        text = page.to_markdown(found, messages, workdir)
        (workdir / 'report.md').write_text(text, encoding='utf-8')
        (workdir / 'report.html').write_text(page.to_html(text, workdir), encoding='utf-8')
    except (ImportError, ValueError) as error:
        raise SystemExit(str(error)) from None
    for message in messages:
        print(message)
    print(f'{len(found)} results: {workdir / "report.md"}, {workdir / "report.html"}')


if __name__ == '__main__':
    app.run(main)
