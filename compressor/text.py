"""Text that came from outside."""


def is_unicode(text: str) -> bool:
    """False where bytes that were not UTF-8, or half a surrogate pair escaped in JSON, became lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
