"""Config sections built from keyword arguments are validated like those of a config; messages name the caller's argument."""

import pytest

from jaxalign.config import DPOConfig, Optimizer, PPOConfig, PreferenceConfig, section_from
from jaxalign.errors import UserError


def test_fields_and_nested_sections_are_set_and_the_rest_keep_their_defaults():
    section = section_from(PPOConfig(), {"kl_coef": 1, "optimizer": {"learning_rate": 0.5}, "group_size": 4}, "PPO")
    assert (section.kl_coef, section.optimizer.learning_rate, section.optimizer.eps) == (1.0, 0.5, 1e-5)
    assert section_from(PPOConfig(), {"optimizer": Optimizer(b1=0.5)}, "PPO").optimizer == Optimizer(b1=0.5)
    assert section_from(PPOConfig(), {}, "PPO") == PPOConfig()


def test_the_callers_model_and_data_do_not_restrict_a_section():
    assert section_from(DPOConfig(), {"objective": "kto", "max_length": 4096}, "DPO").max_length == 4096
    assert section_from(PreferenceConfig(), {"margin_weight": 1.0}, "RewardModel").margin_weight == 1.0


@pytest.mark.parametrize("default, fields, sentence", [
    (PPOConfig(), {"kl_coeff": 0.1}, "PPO.kl_coeff is not a field of PPO; did you mean kl_coef?"),
    (PPOConfig(), {"epochs": 0.5}, "PPO.epochs is 0.5 (float); an int is expected"),
    (PPOConfig(), {"optimizer": {"b1": 2}}, "PPO.optimizer.b1 is 2.0; it must be between 0.0 and 0.9999999"),
    (PPOConfig(), {"clip": 1.5}, "PPO.clip is 1.5; a ratio cannot fall below 0, so it must be at most 1"),
    (PPOConfig(), {"lam": 0.5, "advantages": "remax"}, "PPO.lam is 0.5, which has no effect when PPO.advantages is 'remax': "
     "leave it at 0.95, or set PPO.advantages to gae or vtrace"),
    (PPOConfig(), {"optimizer": {"kind": "lion", "eps": 0.1}}, "PPO.optimizer.eps is 0.1, which has no effect when "
     "PPO.optimizer.kind is 'lion': leave it at 1e-05, or set PPO.optimizer.kind to adamw, muon or sophia"),
    (DPOConfig(), {"objective": "robust"}, "DPO.label_smoothing is 0; objective 'robust' needs it above 0, for example 0.1"),
])
def test_mistakes_name_the_argument(default, fields, sentence):
    with pytest.raises(UserError) as caught:
        section_from(default, fields, "DPO" if isinstance(default, DPOConfig) else "PPO")
    assert str(caught.value) == sentence
