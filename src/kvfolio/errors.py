"""Every error kvfolio raises on purpose, as one tree.

Knows nothing of the rest of the package. A message says what was given, what is accepted and what to do.

    KvfolioError
    ├── SpecError            a model that cannot be read or is not known
    │   ├── UnknownModelError    architecture, field value or format outside what kvfolio knows
    │   └── BrokenModelError     a file that is missing, cut or inconsistent
    ├── RequestError         a request that can never be served as asked
    ├── BudgetError          memory that does not suffice
    ├── OptionError          an option or argument outside its range
    └── InvariantError       kvfolio has a bug: a conservation law of the cache is broken
"""


class KvfolioError(Exception):
    """Base of all errors a user may meet; the CLI prints it in one line and exits with status 2."""


class SpecError(KvfolioError):
    """The model cannot be read."""


class UnknownModelError(SpecError):
    """The architecture, a field value or a format is not one kvfolio knows; it is named, never guessed."""


class BrokenModelError(SpecError):
    """A model file is missing, cut short or contradicts itself."""


class RequestError(KvfolioError):
    """The request can never be served as asked: empty, longer than the context, larger than the pool."""


class BudgetError(KvfolioError):
    """The memory given does not suffice for what was asked; the message says have, need and the way out."""


class OptionError(KvfolioError):
    """An option or argument lies outside its range."""


class InvariantError(KvfolioError):
    """A law of the cache is broken. This is a bug in kvfolio, not a mistake of the user."""
