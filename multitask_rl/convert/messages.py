"""What the converter says of values: where ours differs from the source, or why a value is not taken over.

``{there}`` is the source's name; other names in braces are given where the message is used. Reasons that hold
for an option whatever its value stand in the tables of the sources.
"""

# algorithms
NO_ESTIMATOR = "{value!r} has no counterpart; type {kind} stands in its place"
NO_LOSS = "{value!r} has no counterpart; the clipped loss of grpo stands in its place"
NO_LOSS_MODE = "{value!r} with {estimator!r} has no counterpart"
NO_AGGREGATION = "{value!r} has no counterpart; the mean over tokens stands in its place"
FLASH_REINFORCE = "its baseline is the mean of the batch, which no type has; grpo stands in its place"
NOT_GSPO = "the ratio of a response is of type gspo, which {estimator} is not"
ONE_RATIO = "one ratio per response has type gspo only, not {kind}"
NOT_DAPO = "only type dapo has a length penalty, not {kind}"
SUM_OF_REWARDS = "type {kind} normalises the sum of the rewards"
WHITENS = "type {kind} whitens its advantages"
WHITENED = "advantages are whitened here"
NOT_WHITENED_AGAIN = "advantages are not whitened once more"
WHITENED_OVER_TOKENS = "advantages are whitened over the task's tokens here"
RUNNING_DEVIATION = "divided by a running deviation of the task, not {std!r}"
BATCH_DEVIATION = "TRL divides by the deviation of the whole batch, here it is a running mean within groups"
NOT_NORMALISED = "rewards are not normalised by {by!r} before advantages are whitened"
TRUNCATED_COUNT = "mean and deviation count truncated responses, too"
MASKED_COUNT = "the mean counts masked responses"
NOT_DISCOUNTED = "rewards of type {kind} are not discounted"
NOT_DISCOUNTED_HERE = "rewards of {kind} are not discounted"
SCALED = "the reward is scaled by its running deviation first"
SCALED_VALUES = f"{SCALED}, so that the unit of values differs"
PER_MICROBATCH = "TRL averages over the tokens of each device's micro-batch"
PER_DEVICE = "the same on one device; on more, TRL averages per device"
PADDED = "ROLL sums over responses and divides by the padded length; here a mean / max_new_tokens"
BONUS_OVER_TOKENS = "TRL's bonus is a mean over tokens, here it is summed up as the loss is"
TERMS_OVER_TOKENS = "with a KL or entropy term OpenRLHF averages those over tokens"
DELTA = "below 1 + epsilon_high it bounds more in TRL"
CISPO_BOUND = (
    "epsilon_high: with loss_type 'cispo' TRL bounds the weight itself by {bound:g}, also where nothing has "
    "changed; clip_high is 1 less and must be above 0. TRL recommends 5.0"
)

# KL to the reference, and weights for engine mismatch
BOTH_KL = "a task has the KL in its loss or in its reward, not in both"
K1_IN_REWARD = "{value!r}: the KL in the reward is k1"
NO_ESTIMATE = "{value!r} has no counterpart; k3 is written"
RATIO_LATER = "the same gradient in the first update after sampling; {there} weighs it by the ratio later"
KL_TARGET = "{there}'s target is the KL per token, ours per response: set kl.target"
KL_AFTER_SCALING = "verl adds it to the reward before rewards are scaled; here it is subtracted after"
KL_SCALED = f"{KL_AFTER_SCALING}, so the coefficient is in units of the scaled reward"
KL_CENTRED = (
    "OpenRLHF subtracts the KL still to come from each token and does not centre it; here the KL of the "
    "response is centred in its group"
)
KL_AFTER_NORMALISING = "subtracted after advantages are normalised, not before"
REFERENCE_STEPS = "the reference moves after every step here, not after {every} updates"
TOKEN_WEIGHTS = "{value!r}: weights are per token only"
TOKEN_WEIGHT = "a weight per {per} in {there}, per token here"
WEIGHT_CUT = "{there}'s mode is {mode}; here each token's weight is cut"
WEIGHT_CUT_ABOVE = "{how} per {level} in {there}, here a token's weight is cut at its upper bound"

# batches, steps and the learning rate
LAST_PARTIAL = "the last update of a step is not full in {there}"
LAST_SMALLER = "{there}'s last mini-batch is smaller, here all are equal"
LAST_OVERLAPS = "{there}'s last update reaches into the next batch"
ONE_PROCESS = "counted for one process; give --processes N for a launch on several devices"
ONE_DEVICE = "for one device; {there}'s number depends on them"
GENERATIONS = (
    "steps_per_generation ({chunks}) is below gradient_accumulation_steps ({accumulation}): an update holds "
    "several generations, which fits only whole ones and num_iterations 1"
)
INDIVISIBLE = (
    "a generation has {responses} responses (per_device_train_batch_size {per_device} x {processes} "
    "processes x {steps} steps), which num_generations ({size}) does not divide; give the number of devices "
    "of the launch: --processes N"
)
REFILL_ROUNDS = "verl samples again until the batch is full; here at most so many rounds, then it trains"
REFILL_RANGE = "OpenRLHF keeps groups with a mean score in ({low:g}, {high:g}), here rewards differ"
REFILL_EQUAL = (
    "ROLL samples until the batch is full; here up to ten times, and only groups of equal rewards go"
)
WHOLE_STEPS = "a whole number of steps here"
STEPS_GIVEN = "{option} is given, which {there} prefers"
PASSES = (
    "counts passes over rows whose number is not known here: give --rows N, or set max_steps (the default, "
    "{default}, holds until then)"
)
SHARE_OF_STEPS = "a share of steps whose number is not known; give --rows N"
SHARE_TO_SET = "a share of all steps, whose number is not known; set {key}"
NO_STEPS = "{value!r} has no number of steps here; set {key}"
ROUNDED = "{number} updates there, {here} here"
PER_STEP = "ROLL counts updates, here steps of {updates}"
NO_SCHEDULE = "{value!r} has no counterpart; {schedule} is written"
CONSTANT_RATE = "{value!r} has no counterpart; the rate is constant"
LOWEST_RATE = "{there} ends at {lowest:g} of the rate, here it ends at 0"
NO_WARMUP = "this schedule has no warm-up"
NO_WARMUP_CONSTANT = "{there}'s schedule 'constant' has no warm-up"
FIRST_STEP = "{there}'s first step has rate 0, here it has the first step of the rise"
FIRST_UPDATE = "{there}'s first update has rate 0, here it has the first step of the rise"
ADAMW = "{value!r}: the optimizer is AdamW"

# data and rewards
ROWS_ALIKE = "{there} draws rows of all files alike; give weights by rows"
SETS_ALIKE = "rows of all sets are drawn alike; give weights by rows"
HELD_OUT_FILES = "{files} files for {tasks} tasks; set eval_dataset of each"
NO_HELD_OUT = "{file} has no row of it: a tenth of its training rows is held out"
SOURCES_TO_TASKS = "{file} becomes a task for each of its sources"
ONE_TASK = "rows of all values are one task, as in TRL; a task for each value may have its own rewards"
TENTH = "a tenth of the rows, by a hash of each row instead of a seed"
OTHER_SHARE = "a tenth of the rows is held out here; eval_dataset of a task names others"
CHANGED_ROWS = (
    "the script changes the rows ({changes}); save the changed ones with dataset.to_json('rows.jsonl') and "
    "give --dataset rows.jsonl"
)
LONG_PROMPTS = "verl ends with an error or cuts; here they are left out"
HALF_EACH = "OpenRLHF gives a response what its prompt leaves of {whole} tokens; here half is for each"
TEMPLATE_UNUSED = "OpenRLHF does not use it with apply_chat_template"
DEFAULT_SCORE = (
    "verl's own table of rewards by data source, which needs verl installed; --reward names another"
)
ONE_LOGIT = "one logit of a classification model; verl may ask a generating one"
ONE_RESPONSE = (
    "compute_score gets one response at a time here: f(data_source, solution_str, ground_truth, ...)"
)
NO_EOS = "a query of OpenRLHF ends with the special tokens of the response, here it has none"
MATH_VERIFY = "both use math-verify; see docs/graders.md"
OUR_SANDBOX = "programs run in our sandbox"
JUDGE_SCALE = "a server gives 0 to 10 (vllm serve MODEL); ROLL's judge says yes or no"
JUDGE_KEY = "is read from the environment variable OPENAI_API_KEY"
LETTER_ALONE = "the letter alone; ROLL adds penalties for repetitions and for length"
NO_WORKER = "{worker} has no counterpart; write it as reward_{name}() in rewards.py"

# the run
ENGINE = "{engine!r}: the engines are hf and vllm; hf is written"
ATTENTION = "model.attn_implementation=auto: kernels that share a group's prompt"
MEGATRON_NAMES = "names of Megatron's modules; model.lora.target_modules has those of transformers"
NO_MODEL_KEYS = "no counterpart for {names}"
NO_TRACKER = "no tracker of the name {names} is installed"
NO_RESUME = "a checkpoint of {there} cannot be resumed here; load its weights as the model"
NO_RESUME_FROM = "no resume from a checkpoint of {there}; give its weights as the model"
