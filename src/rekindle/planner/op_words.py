"""Words for ops: plans name ops as people do, `mm` for `aten::mm`."""


def word_of(name: str) -> str:
    """The word for an op, by its name.

    >>> [word_of(name) for name in ("aten::mm", "aten::add_.Tensor", "aten::native_layer_norm")]
    ['mm', 'add', 'layer_norm']
    >>> word_of("aten::_scaled_dot_product_flash_attention")
    'attention'
    """
    word = name.rpartition("::")[2].split(".")[0].strip("_")
    if "attention" in word:
        return "attention"
    return _WORDS.get(word, word.removeprefix("native_"))


_WORDS = {"to_copy": "cast"}
