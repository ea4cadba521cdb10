"""`python -m tests.documents`: write the pages of docs/ that are made from the code."""

from tests.documents import DOCS, PAGES

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
