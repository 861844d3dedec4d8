"""Every operator and version that the installed onnx knows."""

from __future__ import annotations

import bisect
import collections
from dataclasses import dataclass
from typing import Any

from onnx import defs

__all__ = ["Version", "every_version"]


@dataclass(frozen=True)
class Version:
    """An operator as it is since a version of its domain, and the versions of the domain in which it is so.

    `opsets` leaves out those below 7, which ONNX Runtime does not promise to run, where newer ones are left.
    """

    domain: str
    operator: str
    since: int
    opsets: range
    schema: Any

    @property
    def name(self) -> str:
        """As "Conv-11"; with its domain, if that is not ONNX's own."""
        return f"{self.domain + '.' if self.domain else ''}{self.operator}-{self.since}"

    def has(self, attribute: str) -> bool:
        """Whether it has an attribute of that name."""
        return attribute in self.schema.attributes


def every_version() -> list[Version]:
    """All of them, but those that only say that the operator is gone."""
    of: dict[tuple[str, str], dict[int, Any]] = collections.defaultdict(dict)
    for schema in defs.get_all_schemas_with_history():
        of[schema.domain, schema.name][schema.since_version] = schema
    return [
        Version(domain, operator, since, _opsets(domain, since, sorted(schemas)), schema)
        for (domain, operator), schemas in sorted(of.items())
        for since, schema in sorted(schemas.items())
        if not schema.deprecated
    ]


def _opsets(domain: str, since: int, versions: list[int]) -> range:
    newest = defs.onnx_opset_version() if not domain else max(versions)
    later = versions[bisect.bisect(versions, since) :]
    last = later[0] - 1 if later else max(since, newest)
    return range(min(last, max(since, 7)) if not domain else since, last + 1)
