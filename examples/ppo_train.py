"""PPO over several processes: every process that torchrun starts is a learner rank.

    torchrun --nproc_per_node=2 examples/ppo_train.py                 # each rank holds a copy of the weights
    torchrun --nproc_per_node=2 examples/ppo_train.py --use_fsdp      # each rank holds a part of them

Rank 0 is the trainer; the others serve it and end with it. Without torchrun the same script trains in one
process. The reward counts cheerful words, so that any causal language model can learn it.
"""

import argparse

from cheerful import ENDS, STARTS, cheerful

from multitask_rl import PPOConfig, RLTrainer


def main() -> None:
    """Train as the flags say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--actor_model", default="gpt2", help="directory or Hugging Face id")
    parser.add_argument("--use_fsdp", action="store_true", help="shard weights, gradients and moments")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch_size", type=int, default=32, help="responses per step")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--output_dir", default="", help="default: a new directory below runs/")
    flags = parser.parse_args()
    config = PPOConfig(
        model_name=flags.actor_model,
        batch_size=flags.batch_size,
        lr=flags.lr,
        max_steps=flags.steps,
        output_dir=flags.output_dir,
        rollout={"response_length": 32},
        actor_train={"fsdp": {"enabled": flags.use_fsdp}},
    )
    trainer = RLTrainer(config=config, reward_fn=cheerful)
    trainer.train([start + end for start in STARTS for end in ENDS])


if __name__ == "__main__":
    main()
