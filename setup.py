"""Metadata and extras. constraints.txt pins the one stack that `make` installs."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "hybridrl/__init__.py").read_text())[1]
README = ROOT / "README.md"

setup(
    name="hybridrl",
    version=VERSION,
    description="Reinforcement-learning post-training of language models",
    long_description=README.read_text() if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # In the wheel both folders lie inside the package; hybridrl/main.py finds them in either place.
    packages=[*find_packages(include=["hybridrl*"]), "hybridrl.hydra_configs", "hybridrl.recipes"],
    package_dir={"hybridrl.hydra_configs": "hydra_configs", "hybridrl.recipes": "recipes"},
    package_data={
        "hybridrl": ["py.typed", "config/*/*.yaml"],
        "hybridrl.hydra_configs": ["*.yaml", "*/*.yaml"],
        "hybridrl.recipes": ["*.yaml", "*/*"],
        "hybridrl.report": ["assets/*"],
    },
    include_package_data=False,
    # The ranges that were tested.
    install_requires=[
        "torch>=2.13,<2.16",
        "transformers>=5.12,<5.25",
        "ray>=2.60,<3",
        "tensordict>=0.15.3,<0.16",
        "hydra-core>=1.3.2,<1.4",
        "omegaconf>=2.3,<2.4",
        "peft>=0.21,<0.22",
        "aiohttp>=3.14,<4",  # asks SGLang, answers agent programs
        "safetensors>=0.5",
        "filelock",
        "httpx>=0.27,<1",  # comes with transformers; asks reward servers
        "numpy>=2",
        "packaging",
        "pillow>=12,<14",  # reads images of rows; trackio has no other than 12
        "plotly>=6,<8",
        "pybase64>=1.4,<2",  # reads the experts of tokens that SGLang returns
        "pyarrow>=20",
        "pydantic>=2.11,<3",  # comes with transformers; reads the configuration
        "pyyaml",
        "rich>=14",
        "tensorboard>=2.19",
        "tokenizers<0.24",
    ],
    extras_require={
        "sglang": [
            "sglang>=0.5.21,<0.5.24",
            "sglang-router>=0.3.2",
            "torch_memory_saver>=0.0.10",
        ],
        "megatron": [
            # Releases from 0.17 on need Python 3.12.
            "megatron-core>=0.16.1,<0.17; python_version < '3.12'",
            "megatron-core>=0.16.1,<0.20; python_version >= '3.12'",
        ],
        # Fused layers and attention for it: CUDA alone, and compiled where pip finds no wheel. Type
        # --no-build-isolation after torch is installed: else it is compiled for the newest torch.
        "transformer-engine": ["transformer-engine[core_cu13,pytorch]>=2.9,<2.12"],
        "wandb": ["wandb>=0.26.1,<0.32"],
        "mlflow": ["mlflow-skinny>=3.12,<4", "sqlalchemy>=2,<3", "alembic>=1.10.1,<2"],
        "trackio": ["trackio>=0.43,<0.44"],
        "swanlab": ["swanlab>=0.10.3,<0.11"],
        "prometheus": ["prometheus_client>=0.26,<1"],
        "math": ["math-verify[antlr4-9-3]"],  # the parser runtime that omegaconf 2.3 pins
        "mcp": ["mcp>=2.3,<3"],
        "reasoning-gym": ["reasoning-gym>=0.1.25,<0.2"],
        "search": ["bm25s>=0.3.16,<0.4"],
        "cluster": ["ray[default]"],  # the dashboard, which takes `ray job submit`
        "docs": ["mkdocs>=1.6.1,<2", "mkdocs-material>=9.8,<10", "mkdocstrings[python]>=1.0.8,<2"],
        "dev": [
            "alembic>=1.10.1,<2",  # with sqlalchemy: MLflow's store in a file
            "anthropic>=2.14,<3",  # asks the proxy
            "codespell",
            "hypothesis",
            "import-linter",
            "mlflow-skinny>=3.12,<4",
            "mypy",
            "psutil",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ray[default]",  # a test submits a job
            "ruff",
            "setuptools>=77",  # a test builds the wheel
            "sqlalchemy>=2,<3",
            "wandb>=0.26.1,<0.32",
        ],
    },
)
