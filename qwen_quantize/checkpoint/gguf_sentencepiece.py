"""A SentencePiece BPE vocabulary as a byte-pair model of the `tokenizers` library.

SentencePiece has no list of merges: it joins the neighbours whose union has the best score. A list of every
way to put a piece together, ordered by the score of the piece, makes the same choices.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPACE = "▁"


def derive_merges(
    pieces: Sequence[str], scores: Sequence[float], usable: Sequence[bool]
) -> list[tuple[str, str]]:
    """All pairs of usable pieces that join to one, best score first, on ties the longer left part first."""
    known = {piece: score for piece, score, use in zip(pieces, scores, usable, strict=True) if use}
    merges = [
        (score, piece[:cut], piece[cut:])
        for piece, score in known.items()
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in merges]


def sentencepiece_tokenizer(
    pieces: Sequence[str],
    scores: Sequence[float],
    usable: Sequence[bool],
    unknown: str | None,
    prefix_space: bool,
) -> Tokenizer:
    """A tokenizer without added tokens; bytes that no piece covers become `<0xNN>` pieces."""
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=derive_merges(pieces, scores, usable),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme="first" if prefix_space else "never", split=False
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
