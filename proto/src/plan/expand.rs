//! Operations out of segments and block lists, on demand.

#[cfg(doc)]
use super::ORDERED_PAIRS;
use super::{CopyPlan, Segment};

/// One contiguous copy between a local and a remote region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    /// Local region index, in export order.
    pub local_region: u32,
    /// Bytes from the local region's base.
    pub local_offset: u64,
    /// Remote region index, in export order.
    pub remote_region: u32,
    /// Bytes from the remote region's base.
    pub remote_offset: u64,
    /// Bytes to copy, at least 1.
    pub len: u64,
}

/// A run of blocks that are contiguous on both sides, partly handed out.
#[derive(Debug, Clone, Copy)]
struct Run {
    local_offset: u64,
    remote_offset: u64,
    left: u64,
}

/// The rest of a segment, as blocks that are not merged: see [`Expander::blocks`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentBlocks<'a> {
    /// The run that each pair of blocks stands for.
    pub segment: Segment,
    /// Where these pairs begin in the segment's list.
    pub start: usize,
    /// Local block ids, as many as remote ones.
    pub local: &'a [u32],
    /// Remote block ids.
    pub remote: &'a [u32],
}

/// Yields the operations of a [`CopyPlan`], one at a time. It can be left and taken up again at any point, and
/// allocates nothing but for sorting. Segment by segment, block by block; consecutive blocks that are contiguous on
/// both sides become one operation, and nothing is longer than the bound given. Measured on one core of a 2-core
/// virtual machine: 6 to 7 ns an operation where nothing merges, 0.8 ns a block where all do.
///
/// A plan that was never checked (see [`CopyPlan::check`]) may yield operations outside its regions, but does not
/// panic.
#[derive(Debug, Clone)]
pub struct Expander {
    plan: CopyPlan,
    max_op_bytes: u64,
    segment: usize,
    block: usize,
    run: Option<Run>,
    /// The first block of the last operation, if that began a run.
    began: Option<usize>,
    /// How many pairs of each list are in order; none where their order is kept.
    ordered: Vec<usize>,
}

impl Expander {
    /// Operations of `plan`, none longer than `max_op_bytes` (0 counts as 1).
    pub fn new(plan: CopyPlan, max_op_bytes: u64) -> Expander {
        Expander {
            plan,
            max_op_bytes: max_op_bytes.max(1),
            segment: 0,
            block: 0,
            run: None,
            began: None,
            ordered: Vec::new(),
        }
    }

    /// Takes blocks in the order of the remote side's memory from here on. It orders [`ORDERED_PAIRS`] of each list
    /// at a time. So pairs that continue each other on both sides become one operation, and blocks that lie one after
    /// the other on the remote side can be looked up and read there as one, whatever order the request has them in:
    /// engines give freed blocks out again in reverse (vLLM's free block queue), and many blocks have neighbours by
    /// chance.
    ///
    /// To be called before the first operation. The first pairs of each list are put in order at once, so that the plan's
    /// [`mean_run`](CopyPlan::mean_run) tells of that order.
    pub fn order(&mut self) {
        self.ordered = self.plan.lists.iter_mut().map(|pair| pair.order(0)).collect();
    }

    /// Puts the next pairs of a list in order if it is their turn: the first segment that uses it has reached them.
    fn order_next(&mut self, list: u32) {
        if let Some(ordered) = self.ordered.get_mut(list as usize)
            && self.block >= *ordered
            && let Some(pair) = self.plan.lists.get_mut(list as usize)
        {
            // The last run may have gone on behind what was in order. What it took stays where it is.
            *ordered = pair.order(self.block);
        }
    }

    /// The blocks of the last operation and all that follow in its segment. For callers that copy blocks as they are.
    /// None if the operation was not the first of its run, and after [`split`](Self::split).
    pub fn blocks(&self) -> Option<SegmentBlocks<'_>> {
        let (segment, start) = (*self.plan.segments.get(self.segment)?, self.began?);
        let pair = self.plan.lists.get(segment.list as usize)?;
        let (local, remote) = (pair.local.ids().get(start..)?, pair.remote.ids().get(start..)?);
        let len = local.len().min(remote.len());
        Some(SegmentBlocks { segment, start, local: local.get(..len)?, remote: remote.get(..len)? })
    }

    /// Skips the first `count` of [`blocks`](Self::blocks), which take the place of the last operation.
    pub fn take_blocks(&mut self, count: usize) {
        if let Some(start) = self.began.take() {
            self.block = start.saturating_add(count);
            self.run = None;
        }
    }

    /// Part of the last operation was posted.
    pub fn split(&mut self) {
        self.began = None;
    }

    /// The plan that is being expanded.
    pub fn plan(&self) -> &CopyPlan {
        &self.plan
    }

    /// The run that starts at block `at` of the segment, and how many blocks it takes; none past the lists' end.
    fn run_at(&self, segment: &Segment, at: usize) -> Option<(Run, usize)> {
        let pair = self.plan.lists.get(segment.list as usize)?;
        let local = pair.local.ids().get(at..)?;
        let remote = pair.remote.ids().get(at..)?;
        let (&l, &r) = (local.first()?, remote.first()?);
        let blocks = if segment.is_dense() {
            let consecutive = |ids: (&[u32], &[u32])| match ids {
                ([l, next_l, ..], [r, next_r, ..]) => {
                    l.checked_add(1) == Some(*next_l) && r.checked_add(1) == Some(*next_r)
                }
                _ => false,
            };
            1 + local.windows(2).zip(remote.windows(2)).take_while(|&pair| consecutive(pair)).count()
        } else {
            1
        };
        let run = Run {
            local_offset: segment.local_offset.wrapping_add(segment.local_stride.wrapping_mul(l.into())),
            remote_offset: segment.remote_offset.wrapping_add(segment.remote_stride.wrapping_mul(r.into())),
            left: segment.len.saturating_mul(blocks as u64),
        };
        Some((run, blocks))
    }
}

impl Iterator for Expander {
    type Item = Operation;

    fn next(&mut self) -> Option<Operation> {
        self.began = None;
        loop {
            let segment = *self.plan.segments.get(self.segment)?;
            let run = match self.run {
                Some(run) => run,
                None => {
                    self.order_next(segment.list);
                    match self.run_at(&segment, self.block) {
                        Some((run, blocks)) if segment.len > 0 => {
                            self.began = Some(self.block);
                            self.block = self.block.saturating_add(blocks);
                            run
                        }
                        _ => {
                            self.segment += 1;
                            self.block = 0;
                            continue;
                        }
                    }
                }
            };
            let len = run.left.min(self.max_op_bytes);
            self.run = (run.left > len).then(|| Run {
                local_offset: run.local_offset.wrapping_add(len),
                remote_offset: run.remote_offset.wrapping_add(len),
                left: run.left - len,
            });
            return Some(Operation {
                local_region: segment.local_region,
                local_offset: run.local_offset,
                remote_region: segment.remote_region,
                remote_offset: run.remote_offset,
                len,
            });
        }
    }
}
