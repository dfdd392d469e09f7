"""Finds the variables of a chat template that a request can change.

Jinja's own analysis also returns variables that the template sets itself before each use, such as one that is
set in a branch. Here statements are followed in their order, as they run; where that is unclear, a variable
counts as one of the request.
"""

from collections.abc import Iterable
from functools import reduce

from jinja2 import meta, nodes

_IN_MACROS = frozenset({"varargs", "kwargs", "caller"})
"""Names that Jinja sets in macros."""


def variables_of_request(tree: nodes.Template) -> frozenset[str]:
    """Variables that the template may read before it sets them.

    Raises:
        jinja2.TemplateError: the template cannot be compiled.
    """
    reader = _Reader()
    reader.run(tree.body, frozenset())
    return frozenset(meta.find_undeclared_variables(tree)) & reader.unset


class _Reader:
    """Follows statements with the variables that are set for certain."""

    def __init__(self) -> None:
        self.unset: set[str] = set()
        """Variables that were read where they may be unset."""

    def run(self, statements: Iterable[nodes.Node], defined: frozenset[str]) -> frozenset[str]:
        """Follow statements; returns the variables that are set after them."""
        return reduce(lambda names, statement: self._statement(statement, names), statements, defined)

    def _statement(self, node: nodes.Node, defined: frozenset[str]) -> frozenset[str]:
        if isinstance(node, nodes.Assign):
            self._read(node, defined)
            return defined | _names(node.target)
        if isinstance(node, nodes.AssignBlock):
            self._read(node.filter, defined)
            self._read(node.target, defined)
            self.run(node.body, defined)
            return defined | _names(node.target)
        if isinstance(node, nodes.If):
            return self._branches(node, defined)
        if isinstance(node, nodes.For):
            self._loop(node, defined)
        elif isinstance(node, nodes.Macro):
            self._macro(node, defined)
            return defined | {node.name}
        elif isinstance(node, nodes.CallBlock):
            self._read(node.call, defined)
            self._macro(node, defined)
        elif isinstance(node, nodes.Scope):
            self.run(node.body, defined)
        else:
            self._read(node, defined)
        return defined

    def _branches(self, node: nodes.If, defined: frozenset[str]) -> frozenset[str]:
        """A branch that sets a variable sets it for what follows, if every branch does."""
        ends = []
        for branch in (node, *node.elif_):
            self._read(branch.test, defined)
            ends.append(self.run(branch.body, defined))
        ends.append(self.run(node.else_, defined))
        return frozenset.intersection(*ends)

    def _loop(self, node: nodes.For, defined: frozenset[str]) -> None:
        """What a loop sets is unset after it, and in its next pass."""
        inside = defined | _names(node.target)
        self._read(node.iter, defined)
        self._read(node.test, inside)
        self.run(node.body, inside)
        self.run(node.else_, defined)

    def _macro(self, node: nodes.Macro | nodes.CallBlock, defined: frozenset[str]) -> None:
        for default in node.defaults:
            self._read(default, defined)
        self.run(node.body, defined | _IN_MACROS | frozenset(argument.name for argument in node.args))

    def _read(self, node: nodes.Node | None, defined: frozenset[str]) -> None:
        if node is None:
            return
        for name in (node, *node.find_all((nodes.Name, nodes.NSRef))):
            if isinstance(name, nodes.NSRef) or (isinstance(name, nodes.Name) and name.ctx == "load"):
                self.unset |= {name.name} - defined


def _names(target: nodes.Node) -> frozenset[str]:
    """The variables that an assignment or a loop sets."""
    found = [target] if isinstance(target, nodes.Name) else target.find_all(nodes.Name)
    return frozenset(name.name for name in found)
