"""transformers prints neither warnings nor progress bars."""

import transformers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
