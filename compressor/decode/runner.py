"""One text at a time: the plain face of the batch, with any proposer, exact unless told otherwise."""

from collections.abc import Collection, Iterator, Sequence

from torch import nn

from compressor.decode.batch import Batch, Output, Request
from compressor.decode.decoder import Decoder
from compressor.decode.law import Law
from compressor.decode.length import Fixed, Length
from compressor.proposers.base import Proposer


class Runner:
    """Runs a causal language model with an optional proposer.

    Args:
        model: a `Decoder`, or a transformers causal LM, which is left as it is.
        proposer: None decodes with the target alone.
        num_speculative_tokens: tokens (in a tree: levels) drafted a cycle, or a `Length` that decides.
        rule: "exact", or "typical" for Medusa's LOSSY acceptance.

    Raises UsageError for a negative number of speculative tokens or an unknown rule, and CompressError for a model
    with layers whose state cannot be rolled back.
    """

    def __init__(
        self,
        model: nn.Module | Decoder,
        proposer: Proposer | None = None,
        num_speculative_tokens: int | Length = 3,
        rule: str = "exact",
    ) -> None:
        self.decoder = Decoder(model) if isinstance(model, nn.Module) else model
        self.proposer = proposer
        k = num_speculative_tokens
        self.length: Length = Fixed(k) if isinstance(k, int) else k
        self.rule = rule
        self.batch()  # refuses a bad rule now

    @property
    def num_speculative_tokens(self) -> int:
        return self.length.limit

    def batch(self) -> Batch:
        """An empty batch of this target and proposer, for several texts at once."""
        return Batch(self.decoder, self.proposer, self.length, self.rule)

    def generate(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        law: Law,
        seed: int,
        eos_token_ids: Collection[int] | None = None,
    ) -> Output:
        """Continue `token_ids` by at most `max_new_tokens` tokens drawn from `law`.

        `eos_token_ids` None takes the model's own; an empty collection never stops early. The same arguments give the
        same output; with another proposer the law of the output is the same, not its tokens (greedy: the same tokens,
        as far as the model's logits do not depend on how many positions are computed at once). With an adaptive
        length, which goes by the clock, sampled tokens differ from run to run; their law does not.
        Raises UsageError for an empty prompt, ids outside the vocabulary, or a length beyond the model's positions.
        """
        *_, (_, output) = self.stream(token_ids, max_new_tokens, law, seed, eos_token_ids)
        return output

    def stream(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        law: Law,
        seed: int,
        eos_token_ids: Collection[int] | None = None,
    ) -> Iterator[tuple[list[int], Output]]:
        """`generate`, cycle by cycle: the new tokens of each, and the output so far (the same object every time)."""
        stops = None if eos_token_ids is None else frozenset(eos_token_ids)
        batch = self.batch()
        text = batch.join(Request(token_ids, max_new_tokens, law, seed, stops))
        while not text.done:
            batch.step()
            if text.error is not None:
                raise text.error
            if text.fresh or text.done:  # none while a long prompt is read
                yield text.fresh, text.output
