"""``python -m kvfolio`` is ``kvfolio``. Knows nothing of the verbs."""

from kvfolio.cli import main

main()
