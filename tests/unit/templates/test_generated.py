"""Templates that no model has: a few of those that the campaign generates."""

from collections import Counter

from hypothesis import given, settings

from tests.support.templates.generated import RECIPES, Recipe, judge


@given(RECIPES)
@settings(derandomize=True, max_examples=40)
def test_generated_template_gets_the_ids_of_its_rendering_or_none(recipe: Recipe) -> None:
    judge(recipe, Counter())
