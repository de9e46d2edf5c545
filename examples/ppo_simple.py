"""PPO with an actor, a critic of its own and several rollout workers.

    python examples/ppo_simple.py --num_rollout_workers 2 --actor_model gpt2 --critic_model gpt2

More than one rollout worker are engine replicas in Ray actors (``pip install 'multitask-rl[ray]'``). The
critic is ``--critic_model`` with a value head; it must have the actor's tokenizer. Without that flag the
values are read from the actor's own hidden states. The prompts and the reward are those of ``ppo_train.py``.
"""

import argparse

from cheerful import ENDS, STARTS, cheerful

from multitask_rl import PPOConfig, RLTrainer


def main() -> None:
    """Train as the flags say."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--num_rollout_workers", type=int, default=1, help="engine replicas")
    parser.add_argument("--actor_model", default="gpt2", help="directory or Hugging Face id")
    parser.add_argument("--critic_model", default="", help="directory or Hugging Face id; empty = the actor")
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
        rollout={"response_length": 32, "num_workers": flags.num_rollout_workers},
        critic_train={"model_name": flags.critic_model},
    )
    trainer = RLTrainer(config=config, reward_fn=cheerful)
    trainer.train([start + end for start in STARTS for end in ENDS])


if __name__ == "__main__":
    main()
