"""Prints the reference page: `python -m jaxalign.config > docs/config.md`."""

from jaxalign.config import default_for, reference

if __name__ == "__main__":
    print(reference.markdown(default_for(())), end="")
