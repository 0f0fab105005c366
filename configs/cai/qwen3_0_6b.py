"""Constitutional AI with Qwen3-0.6B.

TABLE
"""

import runpy
from pathlib import Path

_common = runpy.run_path(str(Path(__file__).with_name("common.py")))
Layout, cai_config = _common["Layout"], _common["cai_config"]

_LORA, _FULL = Layout(1, 1, 1, 32, 16, 2), Layout(1, 8, 1, 128, 64, 2)
VARIANTS = {
    "lora": _LORA, "lora,judge=larger": Layout(1, 1, 1, 32, 8, 2), "lora,judge=endpoint": _LORA,
    "full": _FULL, "full,judge=larger": _FULL, "full,judge=endpoint": _FULL,
}


def get_config(variant="lora"):
    config = cai_config(variant, VARIANTS, judge="Qwen3-8B", weights="int8")
    config.data.thinking = config.feedback.thinking = "off"  # Thoughts would exceed the lengths of answers and critiques.
    return config
