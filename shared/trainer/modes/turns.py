"""Chapter 12. Chat template of a run: the model's own or another one, and the tokens that it adds to the vocabulary."""

from shared.course.errors import SettingError
from shared.data.tokenizer import TextTokenizer
from shared.finetune.chat.template import CHATML, ChatTemplate, has_template
from shared.trainer.config import TrainerConfig
from shared.trainer.sections import PREFERRING
from shared.trainer.weights import InitialWeights


def section_of(config: TrainerConfig) -> str:
    return "preferences" if config.mode in PREFERRING else "chats"


def added_tokens(start: InitialWeights, tokenizer: TextTokenizer) -> list[str]:
    """Special tokens that the weights of `start` have no trained row for."""
    known = start.text_tokenizer().special_ids if start.tokenizer else tokenizer.special_ids
    return [name for name in tokenizer.special_ids if name not in known]


def require_trained_turns(config: TrainerConfig, start: InitialWeights, tokenizer: TextTokenizer) -> None:
    """Refuse an adapter whose frozen model has a template of its own and would read turns in tokens that it has never seen.

    Raises:
        SettingError: names the tokens.
    """
    if config.adapter is None or start.tokenizer is None or not has_template(start.tokenizer):
        return
    if added := added_tokens(start, tokenizer):
        section = section_of(config)
        raise SettingError(
            f"{section}.template adds {', '.join(added)} to the vocabulary of a model with a template of its own, and an adapter leaves "
            f"the embeddings of new tokens untrained: give {section}.template auto, which is the model's, or leave out the section adapter."
        )


def template_remark(config: TrainerConfig, start: InitialWeights, template: ChatTemplate | None, tokenizer: TextTokenizer) -> str:
    """Lines for the start of a run: which template it reads and writes, and which tokens are new."""
    if template is None or start.tokenizer is None:
        return ""
    own = ChatTemplate.load(start.tokenizer).source if has_template(start.tokenizer) else None
    if own == template.source:
        line = "Chat template: the model's own.\n"
    else:
        name = "chatml" if template.source == CHATML else str(getattr(config, section_of(config)).template)
        line = f"Chat template: {name}, " + ("as the model has none.\n" if own is None else "in place of the model's own.\n")
    if added := added_tokens(start, tokenizer):
        frozen = ", and the adapter leaves their embeddings as they are" if config.adapter else ""
        line += f"New in the vocabulary: {', '.join(added)}{frozen}.\n"
    return line
