"""What became of the records of a file: how many made rows, what was cut, skipped or bad, and where."""

from collections import Counter
from dataclasses import dataclass, field

from mesp_np.data.records import TEXTS
from mesp_np.errors import LISTED, UserError


@dataclass
class Places:
    """Where something happened: how often, and the first places."""

    count: int = 0
    first: list = field(default_factory=list)

    def add(self, where):
        self.count += 1
        if len(self.first) < LISTED:
            self.first.append(where)


@dataclass
class Source:
    """What became of the records of one file.

    path       the file
    forms      form of record -> how many made rows
    truncated  how many records were cut
    skipped    reason -> Places of records that predict nothing
    bad        Places of rows that could not be used, with the reasons
    written    Places of texts that spell control tokens
    unasked    Places of conversations whose first turn is an answer, which is not learned
    """

    path: str
    forms: Counter = field(default_factory=Counter)
    truncated: int = 0
    skipped: dict = field(default_factory=dict)
    bad: Places = field(default_factory=Places)
    written: Places = field(default_factory=Places)
    unasked: Places = field(default_factory=Places)

    @property
    def has_conversations(self):
        """Whether some of the records are not plain text."""
        return any(form not in TEXTS for form in self.forms)

    def skip(self, reason, where):
        self.skipped.setdefault(reason, Places()).add(where)

    def check(self, max_bad_rows):
        """Raise UserError when more rows are bad than that, or none of the file can be trained."""
        if self.bad.count > max_bad_rows:
            raise self._too_many(max_bad_rows)
        if not self.forms:
            raise self._nothing()

    def _too_many(self, allowed):
        """The error for more bad rows than are allowed; it lists the first."""
        if self.bad.count == 1:
            return UserError(self.bad.first[0])
        more = ["and more"] if self.bad.count > len(self.bad.first) else []
        return UserError("\n  ".join([f"{self.path}: more than {allowed} bad rows; mend them, or allow more with "
                                      "--max-bad-rows", *self.bad.first, *more]))

    def _nothing(self):
        """The error for a file of which nothing can be trained."""
        if not self.skipped and not self.bad.count:
            return UserError(f"{self.path}: is empty", "it must hold some text")
        reasons = [f"{reason}: {', '.join(places.first[:5])}" for reason, places in self.skipped.items()]
        reasons += [f"bad rows: {self.bad.count}, such as {where}" for where in self.bad.first[:1]]
        return UserError(f"{self.path}: no row can be trained ({'; '.join(reasons)})",
                         "give longer texts, or conversations with answers, or raise --seq")
