//! How the blocks of two KV-cache groups meet: the grain, and which token positions go together.
//!
//! Blocks of 16 tokens on the one side and 64 on the other have a common grain of 16 tokens: grain `j` of the sequence
//! lies in entry `j / 1` of the one block list and in entry `j / 4` of the other, there at sub-block `j % 4`. The pair of
//! sub-blocks, the *phase*, repeats every four grains, so four sets of segments serve a sequence of any length.

use crate::geometry::Group;

/// Positions in a local and a remote block that hold the same `count` tokens, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TokenRun {
    pub(super) local: u64,
    pub(super) remote: u64,
    pub(super) count: u64,
}

/// Two groups' block lists in relation to each other. The number of phases is `local_subs * remote_subs`; a grain
/// number modulo that is its phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockGrid {
    /// Tokens per grain.
    pub(super) grain: u64,
    /// Grains per entry of the local block list.
    pub(super) local_subs: u64,
    /// Grains per entry of the remote block list.
    pub(super) remote_subs: u64,
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a.max(1) } else { gcd(b, a % b) }
}

/// The least common multiple. Saturates.
pub(super) fn common_multiple(a: u64, b: u64) -> u64 {
    (a / gcd(a, b)).saturating_mul(b)
}

impl BlockGrid {
    pub(super) fn new(local: &Group, remote: &Group) -> BlockGrid {
        let (l, r) = (local.span(), remote.span());
        let grain = gcd(l, r);
        BlockGrid { grain, local_subs: l / grain, remote_subs: r / grain }
    }

    /// Number of phases. Saturates.
    pub(super) fn phases(&self) -> u64 {
        self.local_subs.saturating_mul(self.remote_subs)
    }

    /// The sub-blocks of a phase, local and remote.
    pub(super) fn subs(&self, phase: u64) -> (u64, u64) {
        (phase % self.local_subs.max(1), phase % self.remote_subs.max(1))
    }

    /// The tokens `from..to` of a phase's grain that both ranks hold, as runs of positions in their blocks. `whole` is the
    /// number of positions of a block that can't be told apart into tokens; such a block is one run.
    pub(super) fn runs(
        &self,
        local: &Group,
        remote: &Group,
        phase: u64,
        tokens: std::ops::Range<u64>,
    ) -> Vec<TokenRun> {
        let (l, r) = self.subs(phase);
        let (l, r) = (l.saturating_mul(self.grain), r.saturating_mul(self.grain));
        if local.token_ranks <= 1 && remote.token_ranks <= 1 {
            let count = tokens.end.saturating_sub(tokens.start);
            let run = TokenRun { local: l.saturating_add(tokens.start), remote: r.saturating_add(tokens.start), count };
            return if count == 0 { Vec::new() } else { vec![run] };
        }
        let mut runs: Vec<TokenRun> = Vec::new();
        for token in tokens {
            let here = local.position(l.saturating_add(token));
            let there = remote.position(r.saturating_add(token));
            let (Some(here), Some(there)) = (here, there) else { continue };
            match runs.last_mut() {
                Some(run) if run.local + run.count == here && run.remote + run.count == there => run.count += 1,
                _ => runs.push(TokenRun { local: here, remote: there, count: 1 }),
            }
        }
        runs
    }
}

/// True if a rank with the tokens of `a` and one with those of `b` have any token in common. Takes no longer for large
/// numbers, which a peer may have made up.
///
/// A rank holds stretches of `token_interleave` tokens, one per period. A stretch of `a` that starts at `x` and one of `b`
/// that starts at `y` overlap if `x - y` lies between `1 - a.token_interleave` and `b.token_interleave - 1`. Over all
/// stretches `x - y` takes every value that leaves the same remainder by the greatest common divisor of the periods.
pub(super) fn share_tokens(a: &Group, b: &Group) -> bool {
    let interleave = |g: &Group| u64::from(g.token_interleave.max(1));
    let period = |g: &Group| interleave(g) * u64::from(g.token_ranks.max(1));
    let first = |g: &Group| i128::from(interleave(g) * u64::from(g.token_rank));
    let step = i128::from(gcd(period(a), period(b)));
    let lowest = 1 - i128::from(interleave(a));
    let above_lowest = (first(a) - first(b) - lowest).rem_euclid(step);
    lowest + above_lowest < interleave(b).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::GroupKind;

    fn dealt(block_size: u32, ranks: u32, rank: u32, interleave: u32) -> Group {
        Group {
            token_ranks: ranks,
            token_rank: rank,
            token_interleave: interleave,
            ..Group::new(GroupKind::Full, block_size)
        }
    }

    #[test]
    fn every_token_of_a_period_meets_once() {
        for (l, r) in [(16, 64), (64, 16), (24, 36), (7, 7), (3, 4)] {
            let (here, there) = (Group::new(GroupKind::Full, l), Group::new(GroupKind::Full, r));
            let grid = BlockGrid::new(&here, &there);
            let mut token = 0;
            for phase in 0..grid.phases() {
                for run in grid.runs(&here, &there, phase, 0..grid.grain) {
                    for i in 0..run.count {
                        assert_eq!((run.local + i, run.remote + i), (token % u64::from(l), token % u64::from(r)));
                        token += 1;
                    }
                }
            }
            assert_eq!(token % u64::from(l) + token % u64::from(r), 0, "whole blocks on both sides");
        }
    }

    #[test]
    fn dealt_tokens_meet_where_both_have_them() {
        let whole = Group::new(GroupKind::Full, 8);
        let odd = dealt(4, 2, 1, 1);
        let grid = BlockGrid::new(&whole, &odd);
        assert_eq!((grid.grain, grid.phases()), (8, 1));
        let runs = grid.runs(&whole, &odd, 0, 0..8);
        let pairs: Vec<_> = runs.iter().map(|r| (r.local, r.remote, r.count)).collect();
        assert_eq!(pairs, [(1, 0, 1), (3, 1, 1), (5, 2, 1), (7, 3, 1)]);
        let pairs: Vec<_> =
            grid.runs(&whole, &dealt(4, 2, 0, 2), 0, 3..8).iter().map(|r| (r.local, r.remote, r.count)).collect();
        assert_eq!(pairs, [(4, 2, 2)]);
        assert!(share_tokens(&whole, &odd));
        assert!(!share_tokens(&dealt(4, 2, 0, 1), &odd));
        assert!(!share_tokens(&dealt(4, 2, 0, 2), &dealt(8, 2, 1, 2)));
        assert!(share_tokens(&dealt(4, 2, 0, 2), &odd), "of tokens 0 and 1, 1 is odd");
        assert!(share_tokens(&dealt(4, 2, 0, 1), &dealt(4, 4, 2, 1)));
        assert!(!share_tokens(&dealt(4, 2, 0, 1), &dealt(4, 4, 3, 1)));
    }

    #[test]
    fn whether_ranks_share_tokens_is_what_listing_them_says() {
        let listed = |a: &Group, b: &Group| (0..1000).any(|t| a.position(t).is_some() && b.position(t).is_some());
        let groups = || {
            (1..5).flat_map(|ranks| {
                (0..ranks).flat_map(move |rank| (1..5).map(move |interleave| dealt(12, ranks, rank, interleave)))
            })
        };
        for a in groups() {
            for b in groups() {
                assert_eq!(share_tokens(&a, &b), listed(&a, &b), "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn made_up_numbers_of_tokens_take_no_longer() {
        let many = dealt(1 << 31, 1 << 20, (1 << 20) - 1, 1 << 31);
        assert!(!share_tokens(&many, &dealt(1 << 31, 1 << 20, 0, 1 << 31)));
        assert!(share_tokens(&many, &dealt((1 << 31) - 1, 1 << 20, 0, (1 << 31) - 1)));
        assert!(share_tokens(&many, &dealt(16, 2, 1, 16)));
    }
}
