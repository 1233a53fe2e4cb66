"""Advantage estimators: from rewards to how much better each response was than expected.

A public top-level function here is a part once ``config/functions/parts.yaml`` lists it.

It takes some of these, and returns a number for each row, float32 [B], or for each token, jagged
float32 [B, L]; without gradient, 0 where the mask is False:

    rewards_B: float32 [B].
    rewards_BL: jagged float32, earned by choosing the token; those of an agent come with the last
        token of their turn.
    group_B: int64 [B], equal numbers answer the same prompt; any order, any sizes.
    response_mask_BL: jagged bool; a row may have none, and gaps (the answers of tools), which end
        a turn. Advantages of rows count a row's tokens by it.
    token_ids_BL: jagged int64, prompts too.
    old_logprobs_BL: jagged float32 nats, before the update.
    values_BL: jagged float32 reward units, the critic's value of the state *before* the token.

Advantages are in reward units, unless they were whitened or divided by a standard deviation.
Where the mean of a group is subtracted, a group of equal rewards gets exact zeros; if whitened,
where all groups are so.

    whiten: shifts and scales the advantages to mean 0 and std 1 over all response tokens.
    singletons: ``reward`` keeps the reward of a group of one, ``zero`` gives it no signal.

Legend, of all files here: B rows, L tokens of a row (jagged), S response tokens of all rows, K
turns of all rows; in ``gdpo`` K reward functions.
"""
