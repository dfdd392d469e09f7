"""Reads from the source of a chat template the values on which a rendering may depend.

These are the constants that its syntax tree compares with, and the names that it reads. A string that is only
printed, such as `<|im_start|>`, is left out, because no condition depends on it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import reduce

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_DECIDING = (
    nodes.Compare,
    nodes.Test,
    nodes.Call,
    nodes.Filter,
    nodes.Getitem,
    nodes.Dict,
    nodes.Assign,
    nodes.Mod,
    nodes.Keyword,
)
"""Nodes under which a constant may decide what is printed."""
_PRINTING_CALLS = frozenset({"raise_exception", "strftime_now"})
_NOT_KWARGS = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        "additional_special_tokens",
    }
)
"""Variables that the renderer sets itself."""
_UNKNOWN_TIME_FORMAT = "%c %f"
"""Replaces a format that is not a constant: it has microseconds, so that no two times are equal."""
_IN_MACROS = frozenset({"varargs", "kwargs", "caller"})
"""Names that Jinja sets in macros."""


@dataclass(frozen=True, slots=True)
class Syntax:
    """The constants and variables of a template."""

    strings: tuple[str, ...]
    """Texts that the template compares with or searches for."""
    numbers: tuple[int, ...]
    """Numbers that the template compares with or divides by; without their signs, fractions rounded up."""
    fields: tuple[str, ...]
    """Names of fields and of items that the template reads."""
    kwargs: Mapping[str, tuple[object, ...]]
    """Variables that a request may set, each with the constants that it is compared with."""
    time_formats: tuple[str, ...] = ()
    """The formats in which the template prints the time; one with microseconds replaces unknown ones."""
    untried: tuple[str, ...] = ()
    """Tests of the characters of a text and operations with numbers whose results depend on more than the
    constants of the source: `isdigit`, `Mul`."""
    parsed: bool = True
    """Whether the source could be parsed."""
    complete: bool = True
    """Whether a rendering depends on no other variable, and merges no new message into the first one; False
    where there is no source to read."""


class _Generation(Extension):
    """Reads `{% generation %}` blocks, in which templates for training wrap assistant text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        # variables that such a block sets are unset after it
        return [nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)]


def parse_source(source: str) -> nodes.Template:
    """The syntax tree of a template. Raises jinja2.TemplateError, RecursionError."""
    # the settings of transformers, which renders the template
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    return environment.parse(source)


def read_syntax(source: str) -> Syntax:
    """Read the source of a template. Empty and not `parsed` for one that cannot be parsed."""
    try:
        tree = parse_source(source)
        # this also folds constants: afterwards `'/no' + '_think'` is one string in the tree
        kwargs = variables_of_request(tree) - _NOT_KWARGS
    except (jinja2.TemplateError, RecursionError, ValueError):
        return Syntax((), (), (), {}, parsed=False)
    strings: dict[str, None] = {}
    numbers: set[int] = set()
    for value in _deciding_values(tree):
        if isinstance(value, str):
            strings[value] = None
        elif isinstance(value, int):
            numbers.add(abs(value))
        elif isinstance(value, float) and math.isfinite(value):
            numbers.add(math.ceil(abs(value)))
    fields = {node.attr: None for node in tree.find_all(nodes.Getattr)}
    for node in tree.find_all(nodes.Getitem):
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            fields[node.arg.value] = None
    numbers_in_order, compared = tuple(sorted(numbers)), _compared_with(tree, kwargs)
    times, untried = tuple(_time_formats(tree)), tuple(dict.fromkeys(_untried(tree)))
    return Syntax(tuple(strings), numbers_in_order, tuple(fields), compared, times, untried)


def join_syntaxes(syntaxes: Sequence[Syntax]) -> Syntax:
    """The combined constants and variables of several templates."""
    kwargs: dict[str, dict[object, None]] = {}
    for syntax in syntaxes:
        for name, values in syntax.kwargs.items():
            kwargs.setdefault(name, {}).update(dict.fromkeys(values))
    return Syntax(
        tuple(dict.fromkeys(string for syntax in syntaxes for string in syntax.strings)),
        tuple(sorted({number for syntax in syntaxes for number in syntax.numbers})),
        tuple(dict.fromkeys(field for syntax in syntaxes for field in syntax.fields)),
        {name: tuple(values) for name, values in sorted(kwargs.items())},
        tuple(dict.fromkeys(time for syntax in syntaxes for time in syntax.time_formats)),
        tuple(dict.fromkeys(name for syntax in syntaxes for name in syntax.untried)),
        all(syntax.parsed for syntax in syntaxes),
    )


def _time_formats(tree: nodes.Template) -> Iterator[str]:
    constants = {
        id(call.node): str(call.args[0].value)
        for call in tree.find_all(nodes.Call)
        if call.args and isinstance(call.args[0], nodes.Const)
    }
    for name in tree.find_all(nodes.Name):
        if name.name == "strftime_now" and name.ctx == "load":
            yield constants.get(id(name), _UNKNOWN_TIME_FORMAT)


def _untried(tree: nodes.Template) -> Iterator[str]:
    """See `Syntax.untried`."""
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr.startswith("is"):
            yield call.node.attr
    for node in tree.find_all((nodes.Filter, nodes.Test)):
        if node.name in (("int", "float") if isinstance(node, nodes.Filter) else ("upper", "lower")):
            yield node.name
    for product in tree.find_all((nodes.Mul, nodes.Pow, nodes.Div, nodes.FloorDiv)):
        # `'  ' * depth` repeats a text
        operands = (product.left, product.right)
        if not any(isinstance(each, nodes.Const) and isinstance(each.value, str) for each in operands):
            yield type(product).__name__


def _deciding_values(tree: nodes.Template) -> Iterator[object]:
    fields = {id(node.arg) for node in tree.find_all(nodes.Getitem)}
    for node in _deciding_nodes(tree):
        # `message['role']` reads a field, and does not compare the text of a message
        yield from (value for value in _constants(node, fields) if not isinstance(value, bool))
    for block in tree.find_all(nodes.AssignBlock):
        for data in block.find_all(nodes.TemplateData):
            yield data.data


def _constants(node: nodes.Node, excluded: Set[int] = frozenset()) -> Iterator[object]:
    """The constants in and under a node, also those inside folded lists and dicts.

    Args:
        excluded: identities of nodes whose value is left out if it is a string.
    """
    constants = [node] if isinstance(node, nodes.Const) else node.find_all(nodes.Const)
    for constant in constants:
        if not (isinstance(constant.value, str) and id(constant) in excluded):
            yield from _scalars(constant.value)


def _scalars(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _scalars(item)
    else:
        yield value


def _deciding_nodes(tree: nodes.Template) -> Iterator[nodes.Node]:
    for node in tree.find_all(_DECIDING):
        called = node.node if isinstance(node, nodes.Call) else None
        if not (isinstance(called, nodes.Name) and called.name in _PRINTING_CALLS):
            yield node
    # the body of a loop, a macro or `{% with %}` is not a condition itself
    for loop in tree.find_all(nodes.For):
        yield loop.iter
    for macro in tree.find_all(nodes.Macro):
        yield from macro.defaults
    for block in tree.find_all(nodes.With):
        yield from block.values


def _compared_with(tree: nodes.Template, names: Set[str]) -> dict[str, tuple[object, ...]]:
    """The constants that each variable is compared with, in the order of the names."""
    values: dict[str, dict[object, None]] = {name: {} for name in sorted(names)}
    for comparison in tree.find_all(nodes.Compare):
        constants = dict.fromkeys(_constants(comparison))
        for variable in comparison.find_all(nodes.Name):
            if variable.name in values:
                values[variable.name] |= constants
    return {name: tuple(compared) for name, compared in values.items()}


def variables_of_request(tree: nodes.Template) -> frozenset[str]:
    """Variables of a template that a request can change: it may read them before it sets them.

    Jinja's own analysis also returns variables that the template sets itself before each use, such as one
    that is set in a branch. Here statements are followed in their order, as they run; where that is unclear,
    a variable counts as one of the request.

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
