//! A request's block ids: what they may be.

use super::rank::{GroupPair, RankPlan};
use super::wanted::Wanted;
use crate::error::{Error, ErrorKind, Result};
use crate::wire::Blocks;

/// The ids of one group.
pub(super) fn ids(lists: &[Blocks], group: u32) -> &[u32] {
    lists.get(group as usize).map(Blocks::ids).unwrap_or_default()
}

/// The ids that are blocks, sorted.
fn sorted(list: &[u32], wanted: &Wanted<'_>) -> Vec<u32> {
    let mut sorted: Vec<u32> = list.iter().copied().filter(|id| !wanted.is_null(*id)).collect();
    if !sorted.is_sorted() {
        sorted.sort_unstable();
    }
    sorted
}

/// Refuses ids that are not blocks of the group, and local blocks that are named twice.
pub(super) fn check_ids(group: &GroupPair, wanted: &Wanted<'_>) -> Result<()> {
    for (side, number, list, bound) in [
        ("local", group.local, ids(wanted.local, group.local), group.local_bound),
        ("remote", group.remote, ids(wanted.remote, group.remote), group.remote_bound),
    ] {
        // The highest id is found several ids at a time, unlike the first that is too high.
        if list.iter().max().is_none_or(|&highest| highest < bound) {
            continue;
        }
        if let Some(id) = list.iter().find(|&&id| id >= bound && !wanted.is_null(id)) {
            return Err(Error::new(
                ErrorKind::OutOfRange,
                format!("KV-cache group {number}: {side} block {id} does not exist, the group has {bound} blocks"),
            ));
        }
    }
    if let Some(id) = twice(ids(wanted.local, group.local), group.local_bound, wanted) {
        return Err(Error::invalid(format!(
            "KV-cache group {}: local block {id} is named twice: it would be written twice",
            group.local
        )));
    }
    Ok(())
}

/// A block that the list names twice. Blocks are below `bound`.
fn twice(list: &[u32], bound: u32, wanted: &Wanted<'_>) -> Option<u32> {
    if list.iter().zip(list.iter().skip(1)).all(|(a, b)| a < b) {
        return None;
    }
    // A bit for each block, where that takes no more memory than the list itself some times over.
    let words = bound as usize / 64 + 1;
    if words / 16 > list.len() {
        let sorted = sorted(list, wanted);
        return sorted.iter().zip(sorted.iter().skip(1)).find(|(a, b)| a == b).map(|(id, _)| *id);
    }
    let mut seen = vec![0u64; words];
    list.iter().copied().filter(|id| !wanted.is_null(*id)).find(|id| {
        let bit = 1u64 << (id % 64);
        seen.get_mut(*id as usize / 64).is_some_and(|word| {
            let again = *word & bit != 0;
            *word |= bit;
            again
        })
    })
}

/// Refuses a local block that two groups on the same memory both name.
pub(super) fn check_shared(rank: &RankPlan, wanted: &Wanted<'_>) -> Result<()> {
    for &(a, b) in &*rank.shared {
        let (first, second) = (sorted(ids(wanted.local, a), wanted), sorted(ids(wanted.local, b), wanted));
        if let Some(id) = first.iter().find(|id| second.binary_search(id).is_ok()) {
            return Err(Error::invalid(format!(
                "local block {id} is in the lists of KV-cache groups {a} and {b}, which share memory: it would be \
                 written twice"
            )));
        }
    }
    Ok(())
}
