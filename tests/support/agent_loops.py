"""Agent loops for tests of verl's trainers. A loop that returns several outputs makes several rows of one session."""

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.workers.rollout.replica import TokenOutput

QUESTION_AGAIN = "Check it."


class TwoTurnLoop(AgentLoopBase):
    """Answer, and answer again after 'Check it.': two rows, the second with the first turn in its prompt.

    Sessions 2, 5, 8, … stop after the first turn, and session 1 of every third question fails.
    """

    async def run(self, sampling_params, priority=0, **kwargs) -> list[AgentLoopOutput]:
        session, question = kwargs["session_id"], kwargs["extra_info"]["index"]
        if session == 1 and question % 3 == 0:
            raise RuntimeError(f"the tool of question {question} is out of order")
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        first = await self._turn(prompt, sampling_params, f"{kwargs['uid']}-{session}-0")
        if session % 3 == 2:
            return [first]
        again = self.tokenizer.encode(f"\n<|im_start|>user\n{QUESTION_AGAIN}<|im_end|>\n<|im_start|>assistant\n")
        prompt = first.prompt_ids + first.response_ids + again
        return [first, await self._turn(prompt, sampling_params, f"{kwargs['uid']}-{session}-1")]

    async def _turn(self, prompt: list[int], sampling_params, request_id: str) -> AgentLoopOutput:
        limit = self.rollout_config.response_length
        answer: TokenOutput = await self.server_manager.generate(
            request_id=request_id, prompt_ids=prompt, sampling_params=sampling_params
        )
        ids = answer.token_ids[:limit]
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=ids,
            response_mask=[1] * len(ids),
            response_logprobs=answer.log_probs[:limit] if answer.log_probs else None,
            num_turns=2,
            metrics={},
            extra_fields={**answer.extra_fields, "turn_scores": [], "tool_rewards": []},
        )
