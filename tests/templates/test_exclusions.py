from tests.templates.exclusions import EXCLUDED
from tests.templates.families import KWARGS, TEMPLATES, kwargs_of, template_files
from tests.templates.matrix import Matrix
from tests.templates.oracle import Impossible, Reason
from tests.templates.pairing import EVERY_PAIRING, Pairing
from tests.templates.shapes import SHAPES, Shape


def test_every_template_is_in_the_matrix() -> None:
    assert set(TEMPLATES) == set(template_files())


def test_every_template_argument_is_read_by_a_template() -> None:
    tried = {name for template in TEMPLATES.values() for name in kwargs_of(template)}
    assert tried == set(KWARGS)


def test_exclusions_name_existing_templates_and_shapes() -> None:
    assert {template for template, _ in EXCLUDED} <= set(TEMPLATES)
    assert {shape for _, shape in EXCLUDED} <= {shape.name for shape in SHAPES}


@EVERY_PAIRING
def test_exclusions_are_true_and_complete(matrix: Matrix, pairing: Pairing) -> None:
    template = pairing.template
    for name in kwargs_of(template):
        excluded = {shape.name: _reason_for(matrix, pairing, shape, name) for shape in SHAPES}
        declared = {shape.name: EXCLUDED.get((template.name, shape.name), (None, ""))[0] for shape in SHAPES}
        assert excluded == declared, name


def _reason_for(matrix: Matrix, pairing: Pairing, shape: Shape, kwargs_name: str) -> Reason | None:
    try:
        matrix.trial(pairing).turn(shape, kwargs_name)
    except Impossible as impossible:
        return impossible.reason
    return None
