"""Calls of the Python API with wrong arguments, one a line: CALL :: WORDS, where the message of the error has the words."""

CALLS_OF_MODELS = r"""
ja.load_model(None) :: folder
ja.load_model(5) :: folder
ja.load_model(b"x") :: folder
ja.load_model("") :: folder
ja.load_model("\ud800") :: folder
ja.load_model("a\0b") :: folder
ja.load_model("x" * 5000) :: folder
ja.load_model([F]) :: folder
ja.load_model(F, {"data": 1}) :: mesh
ja.load_model(F, 2) :: mesh
ja.load_model(F, "data=2") :: mesh
ja.load_model(F, max_length=-5) :: max_length
ja.load_model(F, max_length="64") :: max_length
ja.load_model(F, max_length=6.5) :: max_length
ja.load_model(F, max_length=True) :: max_length
ja.load_model(F, max_length=None) :: max_length
ja.load_model(F, max_length=10**30) :: max_length
ja.load_model(F, dtype="float23") :: dtype
ja.load_model(F, dtype=5) :: dtype
ja.load_model(F, dtype=[]) :: dtype
ja.load_model(F, dtype="int8") :: dtype
ja.load_model(F, compute_dtype="bf16") :: compute_dtype
ja.load_model(F, compute_dtype=16) :: compute_dtype
ja.load_model(F, style="poem") :: style
ja.load_model(F, style=3) :: style
ja.load_model(F, style=[]) :: style
ja.load_model(F, lora={"r": 8}) :: lora
ja.load_model(F, lora=8) :: lora
ja.load_model(F, lora=ja.Lora()) :: lora
ja.load_model(F, lora=ja.Lora(path="/nowhere")) :: nowhere
ja.load_model(F, lora=ja.Lora(rank=2, targets=("nothing",))) :: targets
ja.load_model(F, lora=ja.Lora(rank=10**9)) :: rank
ja.load_model(F, family=5) :: family
ja.load_model(F, family="nothing:here") :: family
ja.load_model(F, lora=ja.Lora(rank=2), seed=2**32) :: seed
ja.load_model(F, seed="1") :: seed
ja.load_model(F, seed=None) :: seed
ja.load_model(F, seed=1.5) :: seed
ja.load_model(F, ja.Mesh(data=64)) :: devices
ja.load_model(F, lora=ja.Lora(rank=2, path="/nowhere")) :: lora.rank
ja.load_model("~nosuchuser/x") :: folder
ja.load_model(F, style="") :: style
ja.load_model(F, ja.Mesh(data=2**40)) :: devices
ja.load_model(F, ja.Mesh(data=2**61 - 1)) :: devices
ja.Mesh(data=-1) :: data
ja.Mesh(data=0) :: data
ja.Mesh(fsdp=1.5) :: fsdp
ja.Mesh(tensor="2") :: tensor
ja.Mesh(zero=7) :: zero
ja.Mesh(offload="frozen") :: offload
ja.load_model(F, ja.Mesh(offload=("optimizer",))) :: offload
ja.Mesh(data=True) :: data
ja.Lora(rank=-1) :: rank
ja.Lora(rank="8") :: rank
ja.Lora(rank=8, alpha=float("nan")) :: alpha
ja.Lora(rank=8, alpha=0) :: alpha
ja.Lora(rank=8, targets="q_proj") :: targets
ja.Lora(rank=8, targets=5) :: targets
ja.Lora(rank=8, base="int4") :: base
ja.Lora(rank=8, path=None) :: path
ja.Lora(rank=8, dora=1) :: dora
p.save(None) :: folder
p.save(5) :: folder
p.save("") :: folder
p.save("\ud800") :: folder
p.save(FILE) :: FILE
p.save(FILE / "x") :: FILE
p.save(tmp / "a", dtype="float23") :: dtype
p.save(tmp / "b", dtype=None) :: dtype
p.save(tmp / "b2", dtype=["float32"]) :: dtype
p.save(tmp / "c", adapters=True) :: adapters
p.save(tmp / "c2", adapters="yes") :: adapters
p.save(tmp / "d", shard_bytes=-1) :: shard_bytes
p.save(tmp / "e", shard_bytes="4GB") :: shard_bytes
p.with_params({"a": 1}) :: params
p.with_params(None) :: params
p.with_params([1, 2]) :: params
p.with_params({**p.params, "embedding": p.params["embedding"][:, :-1]}) :: params
p.with_params({**p.params, "extra": 1}) :: params
p.prompt_ids(None) :: prompt
p.prompt_ids(5) :: prompt
p.prompt_ids(b"Hi") :: prompt
p.prompt_ids("a \ud800 b") :: surrogate
p.prompt_ids([{"role": "user"}]) :: prompt
p.prompt_ids([{"role": "robot", "content": "Hi"}]) :: role
p.answer_ids(None) :: text
p.answer_ids(5) :: text
p.answer_ids(b"x") :: text
p.answer_ids("\udfff") :: surrogate
p.text(None) :: ids
p.text(["a"]) :: ids
p.text([-1]) :: ids
p.text([10**30]) :: ids
p.text([True]) :: ids
p.text([1], prompt=[2**31]) :: prompt
p.text([1.5]) :: ids
p.text("12") :: ids
p.text([1], prompt="Hi") :: prompt
p.text([1], prompt=None) :: prompt
p.text([1], prompt=5) :: prompt
p.text([1], prompt=[-1]) :: prompt
p.messages(None) :: prompt
p.messages({"text": "x"}) :: prompt
"""

CALLS_OF_SAMPLERS = r"""
ja.Sampler(None) :: policy
ja.Sampler(F) :: policy
ja.Sampler(p, temperature="1") :: temperature
ja.Sampler(p, temperature=-1) :: temperature
ja.Sampler(p, temperature=float("nan")) :: temperature
ja.Sampler(p, temperature=None) :: temperature
ja.Sampler(p, temperature=np.ones(2)) :: temperature
ja.Sampler(p, temperature=True) :: temperature
ja.Sampler(p, top_k=1.5) :: top_k
ja.Sampler(p, top_k=-1) :: top_k
ja.Sampler(p, top_k="5") :: top_k
ja.Sampler(p, top_k=None) :: top_k
ja.Sampler(p, top_p=0) :: top_p
ja.Sampler(p, top_p=1.5) :: top_p
ja.Sampler(p, top_p="0.9") :: top_p
ja.Sampler(p, batch=0) :: batch
ja.Sampler(p, batch=-4) :: batch
ja.Sampler(p, batch=2.5) :: batch
ja.Sampler(p, batch="64") :: batch
ja.Sampler(p, batch=10**12) :: batch
ja.Sampler(p, seed=-1) :: seed
ja.Sampler(p, seed=2**32) :: seed
ja.Sampler(p, seed="a") :: seed
ja.Sampler(p, seed=1.0) :: seed
ja.Sampler(p, seed=None) :: seed
ja.Sampler(p, seed=True) :: seed
ja.Sampler(p, sampler="nothing") :: sampler
ja.Sampler(p, sampler=5) :: sampler
ja.Sampler(p, sampler=None) :: sampler
ja.Sampler(p, sampler=lambda: 1) :: sampler
ja.Sampler(p, sampler=object) :: sampler
ja.Sampler(p).update("x") :: policy
ja.Sampler(p).update(None) :: policy
ja.Sampler(p).update(adapted) :: architecture
s.generate("Hi") :: prompts
s.generate([]) :: prompts
s.generate(None) :: prompts
s.generate(5) :: prompts
s.generate([None]) :: prompt
s.generate([5]) :: prompt
s.generate([b"x"]) :: prompt
s.generate(["a \ud800"]) :: surrogate
s.generate({"a": 1}) :: prompts
s.generate(["a " * 2000]) :: prompt
s.generate(["a"], max_new_tokens=6.0) :: max_new_tokens
s.generate(["a"], max_new_tokens=0) :: max_new_tokens
s.generate(["a"], max_new_tokens=-1) :: max_new_tokens
s.generate(["a"], max_new_tokens="6") :: max_new_tokens
s.generate(["a"], max_new_tokens=None) :: max_new_tokens
s.generate(["a"], max_new_tokens=10**9) :: max_new_tokens
s.generate(["a"], n=2.5) :: n is
s.generate(["a"], n=0) :: n is
s.generate(["a"], n="2") :: n is
s.generate(["a"], n=None) :: n is
s.generate(["a"], n=True) :: n is
s.generate(["a"], n=10**7) :: n is
s.generate(["a"], n=2**70) :: n is
s.rollout(["a"], n=10**7) :: n is
s.rollout(["a"], max_new_tokens=10**9) :: max_new_tokens
s.rollout([], 4) :: prompts
"""

CALLS_OF_TRAINERS = r"""
dpo().fit([{**row, "weight": 0} for row in PAIRS]) :: weight
rewarding().fit([{**row, "weight": 0.0} for row in PAIRS]) :: weight
ja.SFT(None) :: model
ja.SFT(F) :: model
ja.SFT(p, learning_rate=1) :: learning_rate
ja.SFT(p, epochs=0) :: epochs
ja.SFT(p, batch_rows=3, micro_batches=2) :: SFT.batch_rows
ja.SFT(p, batch_rows=10**9) :: batch_rows
ja.SFT(p, row_length=2**40) :: row_length
ja.SFT(p, epochs=1.5) :: epochs
ja.SFT(p, epochs="2") :: epochs
ja.SFT(p, epochs=None) :: epochs
ja.SFT(p, batch_rows=-1) :: batch_rows
ja.SFT(p, row_length=True) :: row_length
ja.SFT(p, optimizer=5) :: optimizer
ja.SFT(p, optimizer={"lr": 1}) :: lr
ja.SFT(p, optimizer={"learning_rate": float("nan")}) :: learning_rate
ja.SFT(p, optimizer={"learning_rate": np.array([1, 2])}) :: learning_rate
ja.SFT(p, optimizer={5: 1}) :: 5
ja.SFT(p, seed=-1) :: seed
ja.SFT(p, seed=2**32) :: seed
ja.SFT(p, seed=1.5) :: seed
ja.SFT(p, seed=None) :: seed
ja.SFT(p, directory=5) :: directory
ja.SFT(p, directory=b"x") :: directory
ja.SFT(p, directory="") :: directory
ja.SFT(p, directory="\ud800") :: directory
ja.SFT(p, directory="a\0b") :: directory
ja.SFT(p, directory=FILE) :: directory
ja.SFT(p, directory=FILE / "x") :: directory
ja.SFT(p, directory="/" + "x" * 5000) :: directory
ja.SFT(p, directory=[tmp]) :: directory
ja.SFT(p, trackers=object()) :: trackers
ja.SFT(p, trackers=["tensorbord"]) :: trackers
ja.SFT(p, trackers=[dict]) :: trackers
ja.SFT(p, trackers="tensorboard") :: trackers
ja.SFT(p, trackers=5) :: trackers
ja.SFT(p, trackers="") :: trackers
ja.SFT(p, trackers=b"") :: trackers
ja.SFT(p).fit(EXAMPLES, progress=True) :: progress is an argument of SFT, not of SFT.fit
ja.DPO(p).fit(PAIRS, epochs=2) :: epochs is an argument of DPO, not of DPO.fit
ja.RewardModel(p).fit(PAIRS, directory=tmp) :: directory is an argument of RewardModel, not of RewardModel.fit
ja.PPO(p, f).fit(["a"], iterations=2) :: iterations is an argument of PPO, not of PPO.fit
ja.PPO(p, f).fit(["a"], heldout=["a"]) :: did you mean held_out?
ja.PPO(p, f).fit() :: prompts
ja.SFT(p).fit(EXAMPLES, EXAMPLES, 3) :: eval_every
ja.SFT(p, trackers={"a": 5}) :: trackers
ja.SFT(p, trackers={5: 5}) :: trackers
ja.SFT(p, progress="no") :: progress
ja.SFT(p, progress=None) :: progress
ja.SFT(p).policy :: fit
ja.SFT(p).save(tmp / "s") :: fit
sft().fit(None) :: rows
sft().fit([]) :: rows
sft().fit(5) :: rows
sft().fit("text") :: rows
sft().fit([None]) :: rows
sft().fit([5]) :: rows
sft().fit([""]) :: rows
sft().fit([b"x"]) :: rows
sft().fit(iter([])) :: rows
sft().fit([{"prompt": "x"}]) :: response
sft().fit([{"prompt": "x", "response": None}]) :: response
sft().fit([{"prompt": "x", "response": 5}]) :: response
sft().fit([{"prompt": None, "response": "y"}]) :: prompt
sft().fit([{"prompt": "", "response": "y"}]) :: prompt
sft().fit([{"prompt": "x", "response": "\ud800"}]) :: surrogate
sft().fit(["a \udc00 b"]) :: surrogate
sft().fit([{"messages": []}]) :: messages
sft().fit([{"messages": None}]) :: messages
sft().fit([{"messages": [{"role": "user", "content": "x"}]}]) :: messages
sft().fit({"prompt": ["a", "b"], "response": ["c"]}) :: length
sft().fit({}) :: rows
sft().fit({"prompt": "a", "response": "b"}) :: prompt
sft().fit(np.ones(3)) :: rows
ja.DPO(None) :: model
ja.DPO(p, 5) :: objective
ja.DPO(p, objective="nothing") :: objective
ja.DPO(p, objective=None) :: objective
ja.DPO(p, beta=-1) :: beta
ja.DPO(p, beta="0.1") :: beta
ja.DPO(p, beta=float("inf")) :: beta
ja.DPO(p, seed=2**33) :: seed
ja.DPO(p, directory=FILE) :: directory
ja.DPO(p, trackers=[5]) :: trackers
dpo().fit(None) :: pairs
dpo().fit([]) :: pairs
dpo().fit([{"prompt": "x", "chosen": "y"}]) :: rejected
dpo().fit([{"prompt": "x", "chosen": "y", "rejected": None}]) :: rejected
dpo().fit([{"prompt": "x", "chosen": 5, "rejected": "z"}]) :: chosen
dpo().fit([{"prompt": "x", "chosen": "same", "rejected": "same"}]) :: rejected
dpo().fit({"prompt": ["x"], "chosen": ["same"], "rejected": ["same"]}) :: rejected
dpo().fit([{"prompt": "x", "chosen": "y", "rejected": "z", "label": 2}]) :: label
dpo().fit([{"prompt": "x", "chosen": "y", "rejected": "z", "label": "1"}]) :: label
dpo().fit([{"prompt": "x", "chosen": "y", "rejected": "z", "label": None}]) :: label
dpo().fit([{"prompt": "x", "chosen": "y", "rejected": "z", "label": np.ones(2)}]) :: label
dpo().fit([{"prompt": "x", "chosen": "y", "rejected": "z", "weight": float("nan")}]) :: weight
dpo().fit([{"prompt": "x", "chosen": "y", "rejected": "z", "weight": -1}]) :: weight
dpo().fit([{"prompt": "x", "chosen": "\ud800", "rejected": "z"}]) :: surrogate
dpo().fit([{"prompt": 5, "chosen": "y", "rejected": "z"}]) :: prompt
dpo().fit([{"prompt": "x", "completion": "y", "label": True}]) :: kto
dpo(objective="kto").fit([{"prompt": "x", "completion": "y", "label": 2}]) :: label
dpo(objective="kto").fit([{"prompt": "x", "completion": None, "label": True}]) :: completion
ja.RewardModel(None) :: model
ja.RewardModel(p, members=0) :: members
ja.RewardModel(p, batch=0) :: batch
ja.RewardModel(p, human="x") :: human
ja.RewardModel(p, held_out_share=2) :: held_out_share
ja.RewardModel(p, seed=-3) :: seed
ja.RewardModel(p, directory=FILE) :: directory
rewarding().fit(None) :: pairs
rewarding().fit([{"prompt": "x", "chosen": "same", "rejected": "same"}]) :: rejected
rewarding().fit(PAIRS, [5]) :: held_out
rewarding(early_stopping=True).fit(PAIRS, []) :: held_out
rewarding(early_stopping=True).fit(PAIRS, 5) :: held_out
rewarding().fit([{**PAIRS[0], "margin": -1}]) :: margin
rewarding().fit([{**PAIRS[0], "margin": "x"}]) :: margin
rewarding().score(["a"], ["b"]) :: fit
rewarding().as_reward() :: fit
rewarding().save(tmp / "r") :: fit
rm.score(["a"], [None]) :: responses
rm.score(["a"], [5]) :: responses
rm.score(["a"], [b"x"]) :: responses
rm.score(["a"], "b") :: responses
rm.score("a", ["b"]) :: prompts
rm.score(["a"], []) :: responses
rm.score([], []) :: prompts
rm.score(["a", "b"], ["c"]) :: unequal
rm.score(None, ["b"]) :: prompts
rm.score([None], ["b"]) :: prompts
rm.score(["a"], ["\ud800"]) :: surrogate
rm.score(["a"], {"x": 1}) :: responses
rm.save(None) :: folder
rm.save(FILE) :: FILE
rm.save(tmp / "q", dtype="x") :: dtype
"""

CALLS_OF_RL = r"""
ja.PPO(None, f) :: policy
ja.PPO(F, f) :: policy
ja.PPO(p, None) :: reward
ja.PPO(p, 5) :: reward
ja.PPO(p, "nothing") :: reward
ja.PPO(p, "no.module:f") :: reward
ja.PPO(p, []) :: reward
ja.PPO(p, rewarding()) :: fit
ja.PPO(p, f, reference="x") :: reference
ja.PPO(p, f, reference=adapted) :: reference
ja.PPO(p, f, start_critic=p) :: start_critic
ja.PPO(p, f, sampler=5) :: sampler
ja.PPO(p, f, sampler="nothing") :: sampler
ja.PPO(p, f, prompts=["a"]) :: prompts
ja.PPO(p, f, stop="x") :: stop
ja.PPO(p, f, stop=None) :: stop
ja.PPO(p, f, stop=5) :: stop
ja.PPO(p, f, iterations=0) :: iterations
ja.PPO(p, f, iterations="5") :: iterations
ja.PPO(p, f, batch=2.5) :: batch
ja.PPO(p, f, batch=7, minibatches=2) :: PPO.batch
ja.PPO(p, f, max_new_tokens=-1) :: max_new_tokens
ja.PPO(p, f, kl_coef=float("nan")) :: kl_coef
ja.PPO(p, f, kl_coef=-1) :: kl_coef
ja.PPO(p, f, advantages="nothing") :: advantages
ja.PPO(p, f, advantages=5) :: advantages
ja.PPO(p, f, group_size=3, advantages="grpo", batch=8) :: group_size
ja.PPO(p, f, score_clip=1.0) :: score_clip
ja.PPO(p, f, seed=-1) :: seed
ja.PPO(p, f, seed=2**32) :: seed
ja.PPO(p, f, directory=FILE) :: directory
ja.PPO(p, f, trackers=[5]) :: trackers
ja.PPO(p, f, temperature=0) :: temperature
ja.PPO(p, f, max_dropped_share=0.5) :: max_dropped_share
ppo(f).fit(None) :: prompts
ppo(f).fit([]) :: prompts
ppo(f).fit("a") :: prompts
ppo(f).fit([None]) :: prompts
ppo(f).fit([""]) :: prompts
ppo(f).fit(["a", {"prompt": "b", "x": 1}]) :: columns
ppo(f).fit(["\ud800"]) :: surrogate
ppo(f).fit([{"prompt": "a", "prompts": 1}]) :: prompts
ppo(f).fit([{"prompt": "a", 5: 1}]) :: 5
ppo(f).fit([{"x": "a"}]) :: prompt
ppo(f).fit(["a " * 3000]) :: prompt
ja.evaluate(None, ["a"]) :: models
ja.evaluate({}, ["a"]) :: models
ja.evaluate({"a": 5}, ["a"]) :: models
ja.evaluate([p], ["a"]) :: models
ja.evaluate({5: p}, ["a"]) :: models
ja.evaluate({"": p}, ["a"]) :: models
ja.evaluate(p, []) :: prompts
ja.evaluate(p, [{"prompt": "a", "x": 1}, "b"], measures={"x": f}) :: columns
ja.evaluate(p, None) :: prompts
ja.evaluate(p, ["a"], measures=[f]) :: measures
ja.evaluate(p, ["a"], measures=f) :: measures
ja.evaluate(p, ["a"], measures={"x": 5}) :: measure
ja.evaluate(p, ["a"], measures={5: f}) :: measures
ja.evaluate(p, ["a"], measures={" ": f}) :: measures
ja.evaluate(p, ["a"], measures={"x": lambda p, r: None}, max_new_tokens=2) :: x
ja.evaluate(p, ["a"], judge=object()) :: judge
ja.evaluate({"a": p, "b": p}, ["a"], judge="x") :: judge
ja.evaluate(p, ["a"], temperature="0") :: temperature
ja.evaluate(p, ["a"], temperature=-1) :: temperature
ja.evaluate(p, ["a"], max_new_tokens=0) :: max_new_tokens
ja.evaluate(p, ["a"], max_new_tokens=2.5) :: max_new_tokens
ja.evaluate(p, ["a"], batch=0) :: batch
ja.evaluate(p, ["a"], batch="8") :: batch
ja.evaluate(p, ["a"], seed=-1) :: seed
ja.evaluate(p, ["a"], seed=2**32) :: seed
"""

CALLS_OF_JUDGES = r"""
ja.Judge(None) :: judge
ja.Judge(5) :: judge
ja.Judge("nothing") :: judge
ja.Judge("no.module:x") :: judge
ja.Judge(object()) :: judge
ja.Judge(Brevity(), 5) :: constitution
ja.Judge(Brevity(), None) :: constitution
ja.Judge(Brevity(), []) :: constitution
ja.Judge(Brevity(), "nowhere") :: constitution
ja.Judge(Brevity(), ["a"], temperature="x") :: temperature
ja.Judge(Brevity(), ["a"], temperature=-1) :: temperature
ja.Judge(Brevity(), ["a"], max_new_tokens=0) :: max_new_tokens
ja.Judge(Brevity(), ["a"], max_new_tokens=1.5) :: max_new_tokens
ja.Judge(Brevity(), ["a"], batch=0) :: batch
ja.Judge(Brevity(), ["a"], batch="x") :: batch
ja.Judge(Brevity(), ["a"], seed=-1) :: seed
ja.Judge(Brevity(), ["a"], seed=2**32) :: seed
ja.Judge(Brevity(), ["a"], seed="x") :: seed
ja.Judge(Brevity(), ["a"], retries=-1) :: retries
ja.Judge(Brevity(), ["a"], retries=1.5) :: retries
ja.Judge(Brevity(), ["a"], max_failed_share=2) :: max_failed_share
ja.Judge(Brevity(), ["a"], reasoning="x") :: reasoning
ja.Judge(Brevity(), ["a"], nothing=1) :: nothing
judge.compare(["a"], [None], [3]) :: first
judge.compare(["a"], ["x"], [3]) :: second
judge.compare(["a"], "x", "y") :: first
judge.compare(["a"], ["x"], []) :: second
judge.compare(["a"], ["x"], ["y", "z"]) :: unequal
judge.compare([], [], []) :: prompts
judge.compare(None, ["x"], ["y"]) :: prompts
judge.compare(["a"], [b"x"], ["y"]) :: first
judge.compare(["a"], None, ["y"]) :: first
judge.compare(["a"], ["\ud800"], ["y"]) :: surrogate
judge.rate(["a"], ["x"], principles=0) :: principles
judge.rate(["a"], ["x"], principles=1.5) :: principles
judge.rate(["a"], [None]) :: responses
judge.rate(["a"], ["x"]) :: rate
judge.critique(["a"], [None]) :: responses
judge.critique(["a"], []) :: responses
judge.critique(["a"], "x") :: responses
judge.revise(["a"], [5]) :: responses
judge.revise(["a"], ["x"], rounds=0) :: rounds
judge.revise(["a"], ["x"], rounds=1.5) :: rounds
judge.revise(["a"], ["x"], rounds="1") :: rounds
judge.revise(["a"], ["x"], rounds=10**6) :: rounds
ja.revise(None, ["a"]) :: model
ja.revise(F, ["a"], judge=judge) :: model
ja.revise(p, [], judge=judge) :: prompts
ja.revise(p, ["a"], judge=judge, rounds=0) :: rounds
ja.revise(p, ["a"], judge=5) :: judge
ja.revise(p, ["a"], judge=judge, temperature=-1) :: temperature
ja.revise(p, ["a"], judge=judge, max_new_tokens=0) :: max_new_tokens
ja.revise(p, ["a"], judge=judge, batch=0) :: batch
ja.revise(p, ["a"], judge=judge, seed=2**32) :: seed
ja.Constitution(None) :: constitution
ja.Constitution(5) :: constitution
ja.Constitution([]) :: constitution
ja.Constitution([""]) :: principle
ja.Constitution([None]) :: principle
ja.Constitution([5]) :: principle
ja.Constitution(b"default") :: constitution
ja.Constitution({"a": 1}) :: constitution
ja.Constitution("") :: constitution
ja.Constitution("\ud800") :: constitution
ja.Constitution("a\0b") :: constitution
ja.Constitution("x" * 5000) :: constitution
ja.Constitution([{"name": "x"}]) :: critique_request
ja.Constitution(["\ud800"]) :: surrogate
ja.Constitution(tmp) :: constitution
"""

CALLS_OF_FUNCTIONS = r"""
ja.advantages.rloo([[1.], [1., 2.]], 2) :: scores
ja.advantages.rloo([1., 2.], 2, mask=10**400) :: mask
ja.advantages.grpo([1., 2.], 2, eps=10**400) :: eps
ja.advantages.grpo([1., 2.], 2, unbiased="x") :: unbiased
ja.advantages.gae([[1.]], [[1.]], [[1]], [[1.], [1., 2.]], 0.95) :: gamma
ja.advantages.discounted_returns([[1.]], [[1]], bootstrap_value=["a"]) :: bootstrap_value
ja.advantages.whiten([[1.]], [[1]], shift_mean="no") :: shift_mean
ja.losses.masked_sum([[1.]], [[1]], axis="x") :: axis
ja.losses.masked_mean([[1.]], [[1]], axis=1.0) :: axis
ja.losses.policy_gradient([[1.], [1., 2.]], [[1.]]) :: logprobs
ja.losses.dpo([1.], [1.], [1.], [1.], beta=10**400) :: beta
ja.losses.mixed_dpo([1.], [1.], [1.], [1.], weights="sigmoid") :: weights
ja.losses.simpo([[1.], [1., 2.]], [1.]) :: chosen_avg_logprobs
ja.advantages.rloo([1., 2.], group_size="2") :: group_size
ja.advantages.rloo([1., 2.], group_size=2.0) :: group_size
ja.advantages.rloo([1., 2.], group_size=1) :: group_size
ja.advantages.rloo([1., 2.], group_size=None) :: group_size
ja.advantages.rloo([1., 2.], group_size=3) :: group_size
ja.advantages.rloo([1., 2.], group_size=True) :: group_size
ja.advantages.rloo([1., 2.], group_size=np.array([2, 2])) :: group_size
ja.advantages.rloo(None, 2) :: scores
ja.advantages.rloo(["a", "b"], 2) :: scores
ja.advantages.rloo([[1.], [2.]], 2) :: scores
ja.advantages.rloo([1., 2.], 2, mask=[1]) :: mask
ja.advantages.rloo([1., 2.], 2, mask="ab") :: mask
ja.advantages.rloo({}, 2) :: scores
ja.advantages.grpo([1., 2.], 2, scale="x") :: scale
ja.advantages.grpo([1., 2.], 2, scale=[]) :: scale
ja.advantages.grpo([1., 2.], 2, eps=-1) :: eps
ja.advantages.grpo([1., 2.], 2, eps="x") :: eps
ja.advantages.grpo([1., 2.], 2, eps=None) :: eps
ja.advantages.grpo([1., 2.], 2, eps=float("nan")) :: eps
ja.advantages.remax([1.], [1., 2.]) :: greedy_scores
ja.advantages.remax(None, None) :: scores
ja.advantages.gae(None, None, None, 1.0, 0.95) :: rewards
ja.advantages.gae([[1.]], [[1.]], [[1]], 2.0, 0.95) :: gamma
ja.advantages.gae([[1.]], [[1.]], [[1]], "x", 0.95) :: gamma
ja.advantages.gae([[1.]], [[1.]], [[1]], None, 0.95) :: gamma
ja.advantages.gae([[1.]], [[1., 2.]], [[1]], 1.0, 0.95) :: values
ja.advantages.broadcast_to_tokens([1.], [1.]) :: mask
ja.advantages.broadcast_to_tokens([1., 2.], [[1.]]) :: advantages
ja.losses.aggregate([[1.]], [[1.]], "nothing") :: nothing
ja.losses.aggregate([[1.]], [[1.]], None) :: None
ja.losses.aggregate(None, [[1.]]) :: shape
ja.losses.masked_mean([[1.]], [1.]) :: mask
ja.losses.policy_gradient([[1.]], [[1., 2.]], [[1]]) :: advantages
ja.losses.policy_gradient("x", [[1.]], [[1]]) :: logprobs
ja.losses.kl_penalty([[1.]], [[1.]], "k9") :: k9
ja.losses.kl_penalty([[1.]], [[1.]], 5) :: 5
ja.responses.response_mask(None) :: rollout
ja.responses.response_stats(None, p.params, roll, 1.0) :: model
ja.responses.response_stats(p.model, {}, roll, 1.0) :: params
ja.responses.response_stats(p.model, None, roll, 1.0) :: params
ja.responses.response_stats(p.model, p.params, None, 1.0) :: rollout
ja.responses.response_stats(p.model, p.params, roll, 0) :: temperature
ja.responses.response_stats(p.model, p.params, roll, -1.0) :: temperature
ja.responses.response_stats(p.model, p.params, roll, "x") :: temperature
ja.responses.response_stats(p.model, p.params, roll, None) :: temperature
ja.config.from_config_dict(None) :: config
ja.config.from_config_dict({"seed": -1}) :: seed
ja.config.from_config_dict({"seed": 2**32}) :: seed
ja.config.from_config_dict({5: 1}) :: 5
ja.config.from_config_dict({"stages": "sft"}) :: stages
ja.config.from_config_dict({"stages": ("nothing",)}) :: nothing
ja.config.from_config_dict([]) :: config
ja.config.to_dict(None) :: config
ja.config.check(None) :: config
ja.pipeline.run(None, tmp / "w") :: config
ja.pipeline.run({"seed": 1}, tmp / "w") :: config
ja.pipeline.run(ja.config.default_config(), tmp / "w") :: config
ja.pipeline.run(ja.config.from_config_dict({}), None) :: workdir
ja.pipeline.run(ja.config.from_config_dict({}), "") :: workdir
ja.pipeline.run(ja.config.from_config_dict({}), 5) :: workdir
ja.pipeline.load_stage("nothing") :: nothing
ja.pipeline.load_stage(None) :: stage
ja.pipeline.find_changes(None, tmp) :: config
ja.pipeline.find_changes({}, tmp) :: config
ja.pipeline.find_changes(ja.config.from_config_dict({}), None) :: workdir
ja.pipeline.find_changes(ja.config.from_config_dict({}), "") :: workdir
ja.pipeline.find_changes(ja.config.from_config_dict({}), b"x") :: workdir
ja.pipeline.find_changes(ja.config.from_config_dict({}), "x" * 5000) :: workdir
ja.config.default_for(5) :: stages
ja.config.default_for(None) :: stages
ja.config.default_for("sft") :: stages
ja.config.default_for([None]) :: stages
ja.registries.ADVANTAGES.get("nothing") :: nothing
ja.registries.ADVANTAGES.get(5) :: 5
ja.registries.ADVANTAGES.get(None) :: None
ja.registries.ADVANTAGES.register(5) :: AdvantageEstimator
ja.LanguageModel(None, None, None, "plain", 64) :: model
ja.LanguageModel(p.model, p.params, p.tokenizer, "x", 64) :: style
ja.LanguageModel(p.model, p.params, p.tokenizer, "plain", -1) :: max_length
ja.LanguageModel(p.model, p.params, p.tokenizer, "plain", "64") :: max_length
ja.LanguageModel(p.model, {"a": 1}, p.tokenizer, "plain", 64) :: params
ja.LanguageModel(p.model, p.params, None, "plain", 64) :: tokenizer
"""
