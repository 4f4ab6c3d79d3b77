"""Figures of `experiments/results`, where the pages of the site refer to them.

Pages name a figure by its path in the repository, so that it is also shown where the
Markdown itself is read.
"""

import pathlib

from mkdocs.structure import files


FIGURES = pathlib.Path("experiments/results/figures")


def on_files(site: files.Files, *, config) -> files.Files:
    """Adds the figures to the files of the site, below `figures/`."""
    root = pathlib.Path(config.config_file_path).parent
    for path in sorted((root / FIGURES).glob("*.svg")):
        site.append(
            files.File.generated(config, f"figures/{path.name}", abs_src_path=str(path))
        )
    return site


def on_page_markdown(markdown: str, **_) -> str:
    """Turns paths of the repository into paths of the site."""
    return markdown.replace(f"](../{FIGURES.as_posix()}/", "](figures/")
