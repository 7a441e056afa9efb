//! What hellos say of regions of this side that were deregistered.

use crate::agent::core::runs::Runs;
use crate::proto::wire::MemoryKind;

/// Runs that a hello names at most: they fit it. Where there are more, the peer uses no memory of this side by itself: it may have
/// metadata of regions that it was not told of.
const MAX_RUNS: usize = 4096;

/// The regions that were deregistered in this agent's life: at most one run more than there are others.
#[derive(Default)]
pub(crate) struct Withdrawn {
    all: Runs,
    /// Those runs of all that device memory is in.
    devices: Runs,
}

impl Withdrawn {
    /// A region is being deregistered.
    pub(crate) fn add(&mut self, index: u32, kind: MemoryKind) {
        let run = self.all.add(index..=index);
        if kind != MemoryKind::Host || self.devices.has_any_of(run.clone()) {
            // With the host memory beside it, which is gone too: else the runs of an agent with both would be ever
            // more.
            let _ = self.devices.add(run);
        }
    }

    /// Those that matter to a peer: all to one that may copy host memory by itself, else those with device memory.
    fn of(&self, is_near: bool) -> &Runs {
        if is_near { &self.all } else { &self.devices }
    }

    /// First and last of each run that a peer is told, ascending: the latest ones.
    pub(super) fn told(&self, is_near: bool) -> Vec<(u32, u32)> {
        let runs = self.of(is_near);
        runs.iter().skip(runs.len().saturating_sub(MAX_RUNS)).collect()
    }

    /// Whether a peer cannot be told all.
    pub(super) fn is_cut(&self, is_near: bool) -> bool {
        self.of(is_near).len() > MAX_RUNS
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

    /// However many regions of either kind there were.
    #[test]
    fn what_is_remembered_grows_with_what_is_registered() {
        let mut withdrawn = Withdrawn::default();
        for index in (0..100_000).filter(|index| index % 1000 != 0) {
            withdrawn.add(index, if index % 2 == 0 { DEVICE } else { MemoryKind::Host });
        }
        assert_eq!((withdrawn.all.len(), withdrawn.devices.len()), (100, 100));
        let of_devices = withdrawn.told(false);
        assert_eq!((of_devices.first(), of_devices.last()), (Some(&(1, 999)), Some(&(99_001, 99_999))));
        let mut withdrawn = Withdrawn::default();
        for (index, kind) in [(1, MemoryKind::Host), (3, DEVICE), (5, MemoryKind::Host)] {
            withdrawn.add(index, kind);
        }
        assert_eq!(withdrawn.told(false), [(3, 3)]);
        withdrawn.add(2, MemoryKind::Host);
        assert_eq!((withdrawn.told(false), withdrawn.told(true)), (vec![(1, 3)], vec![(1, 3), (5, 5)]));
    }
}
