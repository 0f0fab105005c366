"""Prints the reference page: `python -m jaxalign.config > docs/config.md`."""

from jaxalign.config import Config, reference

if __name__ == "__main__":
    print(reference.markdown(Config()), end="")
