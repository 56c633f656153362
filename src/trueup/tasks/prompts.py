"""Problem -> prompt ids, response ids -> text. The only place where text becomes tokens and back."""

from __future__ import annotations

from collections.abc import Sequence

from trueup.tasks.base import Problem


def encode_prompt(problem: Problem, tokenizer) -> list[int]:
    """The ids that a sampler is given: in the chat template where the tokenizer has one, plain text otherwise.

    The beginning-of-sequence token is there exactly once if the tokenizer puts one before ordinary text, and not at all
    otherwise. Rendering a template that holds it and then tokenizing as usual is how it gets doubled, and a doubled one
    costs accuracy without a sign; so the text is tokenized bare, and the token added only where it is missing.
    """
    ids = list(tokenizer.encode(_render(problem, tokenizer), add_special_tokens=False))
    bos = tokenizer.bos_token_id
    # Asked of the tokenizer by example: its flags (add_bos_token, post-processor) differ between kinds of tokenizers.
    # What it may put *after* a text (an end token, for training) has no place in a prompt.
    if bos is not None and tokenizer.encode("a")[:1] == [bos] and ids[:1] != [bos]:
        ids.insert(0, bos)
    if not ids:
        raise ValueError(f"the prompt {problem.prompt!r} has no tokens; a sampler needs at least one to start from")
    return ids


def decode_response(ids: Sequence[int], tokenizer) -> str:
    """The text of a response without special tokens, with its spaces as the model wrote them."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _render(problem: Problem, tokenizer) -> str:
    messages = problem.prompt
    if not getattr(tokenizer, "chat_template", None):
        if isinstance(messages, str):
            return messages
        raise ValueError(
            f"a prompt of chat messages needs a chat template, and this tokenizer has none (the prompt begins "
            f"{str(messages)[:80]!r}). Use a chat model, set tokenizer.chat_template, or give the prompt as plain text"
        )
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise what they like: an unknown role, a missing variable
        roles = [message["role"] for message in messages]
        raise ValueError(
            f"the tokenizer's chat template refuses a prompt with the roles {roles}: {error}. "
            "Some templates take no system message: put its text into the first user message"
        ) from error
