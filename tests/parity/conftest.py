"""Parity tests find the modules beside them."""

import sys
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).parent))
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
