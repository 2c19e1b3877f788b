"""pip install -e .            the package, pretrain_gpt and the tools as commands
pip install -e ".[dev]"     what the tests need as well
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "(.+?)"', (ROOT / "megatron_lite" / "__init__.py").read_text(encoding="utf-8")).group(1)

setup(
    name="megatron_lite",
    version=VERSION,
    description="Megatron-style pretraining of GPT and LLaMA models that one person can read in a day",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["megatron_lite", "megatron_lite.*", "tools", "tools.*"]),
    py_modules=["pretrain_gpt"],
    install_requires=[
        "torch>=2.10",
        "numpy",
        "transformers",
        "datasets",
        "sentencepiece",
        "tokenizers",
        "safetensors",
        "wandb",
        "xxhash",
        "tqdm",
        "matplotlib",
    ],
    extras_require={"dev": ["pytest", "hypothesis", "ruff", "tensorboard"]},
    entry_points={
        "console_scripts": [
            "pretrain_gpt = pretrain_gpt:main",
            "megatron-preprocess-data = tools.preprocess_data:main",
            "megatron-merge-datasets = tools.merge_datasets:main",
            "megatron-inspect-data = tools.inspect_data:main",
            "megatron-train-tokenizer = tools.train_tokenizer:main",
            "megatron-draw-schedule = tools.draw_schedule:main",
            "megatron-trace = tools.trace:main",
            "megatron-generate = tools.generate:main",
            "megatron-evaluate = tools.evaluate:main",
            "megatron-convert-checkpoint = tools.convert_checkpoint:main",
            "megatron-plan = tools.plan:main",
        ]
    },
)
