//! What hellos say of regions of this side that were deregistered.

use std::collections::BTreeMap;

use crate::proto::wire::MemoryKind;

/// Runs that a hello names at most: they fit it. Where there are more, the peer uses no memory of this side by itself: it may have
/// metadata of regions that it was not told of.
const MAX_RUNS: usize = 4096;

/// Indices of regions, as runs: the last one of each by its first.
#[derive(Default)]
struct Runs(BTreeMap<u32, u32>);

impl Runs {
    /// Adds an index.
    fn add(&mut self, index: u32) {
        let before = self.0.range(..=index).next_back().map(|(first, last)| (*first, *last));
        if before.is_some_and(|(_, last)| last >= index) {
            return;
        }
        let first = before.filter(|(_, last)| last.checked_add(1) == Some(index)).map_or(index, |(first, _)| first);
        let behind = index.checked_add(1).and_then(|next| self.0.remove(&next));
        self.0.insert(first, behind.unwrap_or(index));
    }

    /// First and last of each run, of the latest ones.
    fn latest(&self) -> Vec<(u32, u32)> {
        let mut runs: Vec<(u32, u32)> =
            self.0.iter().rev().take(MAX_RUNS).map(|(first, last)| (*first, *last)).collect();
        runs.reverse();
        runs
    }
}

/// The regions that were deregistered in this agent's life.
#[derive(Default)]
pub(crate) struct Withdrawn {
    all: Runs,
    devices: Runs,
}

impl Withdrawn {
    /// A region is being deregistered.
    pub(crate) fn add(&mut self, index: u32, kind: MemoryKind) {
        self.all.add(index);
        if kind != MemoryKind::Host {
            self.devices.add(index);
        }
    }

    /// Those that matter to a peer: all to one that may copy host memory by itself, else those of device memory.
    fn of(&self, is_near: bool) -> &Runs {
        if is_near { &self.all } else { &self.devices }
    }

    /// What a peer is told.
    pub(super) fn told(&self, is_near: bool) -> Vec<(u32, u32)> {
        self.of(is_near).latest()
    }

    /// Whether a peer cannot be told all.
    pub(super) fn is_cut(&self, is_near: bool) -> bool {
        self.of(is_near).0.len() > MAX_RUNS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: MemoryKind = MemoryKind::Cuda { device: 0 };

    #[test]
    fn indices_become_runs_in_whatever_order_they_come() {
        let mut withdrawn = Withdrawn::default();
        for index in [5, 9, 7, 0, u32::MAX, 6, 1, 6, 5] {
            withdrawn.add(index, if index == 9 { DEVICE } else { MemoryKind::Host });
        }
        assert_eq!(withdrawn.told(true), [(0, 1), (5, 7), (9, 9), (u32::MAX, u32::MAX)]);
        assert_eq!(withdrawn.told(false), [(9, 9)]);
        assert!(!withdrawn.is_cut(true));
        for index in 5000..15_000 {
            withdrawn.add(index * 2, MemoryKind::Host);
        }
        let told = withdrawn.told(true);
        assert_eq!(
            (told.len(), told.first(), told.last()),
            (MAX_RUNS, Some(&(21_810, 21_810)), Some(&(u32::MAX, u32::MAX)))
        );
        assert!(withdrawn.is_cut(true) && !withdrawn.is_cut(false));
    }
}
