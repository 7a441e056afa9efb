//! The intersection of two ranks' address maps, as segments.

use std::borrow::Cow;

use super::Segment;
use super::block_grid::TokenRun;
use crate::geometry::{Area, Axes, Piece, fold, runs as run_count};

/// A layer's part on both ranks, and the heads that travel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AreaPair<'a> {
    pub(super) local: Cow<'a, Area>,
    pub(super) remote: Cow<'a, Area>,
    pub(super) first_head: u32,
    pub(super) heads: u32,
}

/// The part of `area` with the content bytes `from..from + len` of each token. For areas whose token is one run.
fn part_of(area: &Area, from: u64, len: u64) -> Area {
    Area { offset: area.offset.wrapping_add(from), content: len, ..area.clone() }
}

/// Finds the areas of a part of a layer, by part; `heads` (the first and how many) are those that travel. Where one side
/// packs K and V and the other does not, the packed area is cut in two; where both pack them, the part `v` is nothing,
/// because `k` stands for both.
///
/// None: there is nothing to copy.
pub(super) fn pair<'a>(
    part: &str,
    (first_head, heads): (u32, u32),
    local: impl Fn(&str) -> Option<&'a Area>,
    remote: impl Fn(&str) -> Option<&'a Area>,
) -> Result<Option<AreaPair<'a>>, PartsDiffer> {
    let found = |local, remote| Ok(Some(AreaPair { local, remote, first_head, heads }));
    let cut = |packed: &Area, other: &Area| {
        let len = other.token_bytes();
        if packed.units != 1 || len > packed.content {
            return Err(PartsDiffer);
        }
        let from = if part == "k" { 0 } else { packed.content - len };
        Ok(part_of(packed, from, len))
    };
    let own = (local(part), remote(part));
    if let (Some(l), Some(r)) = own {
        return found(Cow::Borrowed(l), Cow::Borrowed(r));
    }
    match (own, local("kv"), remote("kv")) {
        ((None, None), Some(_), Some(_)) if part == "v" => Ok(None),
        ((None, None), Some(l), Some(r)) => found(Cow::Borrowed(l), Cow::Borrowed(r)),
        ((Some(l), None), _, Some(r)) => found(Cow::Borrowed(l), Cow::Owned(cut(r, l)?)),
        ((None, Some(r)), Some(l), _) => found(Cow::Owned(cut(l, r)?), Cow::Borrowed(r)),
        _ => Err(PartsDiffer),
    }
}

/// The error for a layer that cannot be copied part by part: one side lacks a part, or packs other parts than the other
/// side has apart.
#[derive(Debug)]
pub(super) struct PartsDiffer;

/// Where the blocks of a segment lie: which pair of lists names them, and the bytes from one to the next.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockStrides {
    pub(super) list: u32,
    pub(super) local: u64,
    pub(super) remote: u64,
}

/// A token run's part within one page on either side: bytes from the first token of the block, and how many tokens.
fn paged<'a>(pair: &'a AreaPair<'_>, runs: &'a [TokenRun]) -> impl Iterator<Item = ([u64; 2], u64)> + 'a {
    let (local, remote) = (&*pair.local, &*pair.remote);
    runs.iter().flat_map(move |run| {
        let mut done = 0;
        std::iter::from_fn(move || {
            let left = run.count.checked_sub(done).filter(|left| *left > 0)?;
            let place = |area: &Area, position: u64| {
                let tokens = u64::from(area.tokens).max(1);
                let (page, token) = (position / tokens, position % tokens);
                let offset = page.wrapping_mul(area.page_stride).wrapping_add(token.wrapping_mul(area.token_stride));
                (offset, if area.pages > 1 { tokens - token } else { u64::MAX })
            };
            let (at_local, local_room) = place(local, run.local.wrapping_add(done));
            let (at_remote, remote_room) = place(remote, run.remote.wrapping_add(done));
            let count = left.min(local_room).min(remote_room);
            done += count;
            Some(([at_local, at_remote], count))
        })
    })
}

/// The unit axis of a pair: contiguous bytes per unit, and the axis. None if the two sides cut a token's bytes into runs
/// that do not fit each other.
fn units(local: &Area, remote: &Area) -> Option<(u64, (u32, [u64; 2]))> {
    let axis = |content: u64, count: u32, l, r| Some((content, (count, [l, r])));
    let (l, r) = (local, remote);
    match (l.units, r.units) {
        (a, b) if a == b => axis(l.content, a, l.unit_stride, r.unit_stride),
        (1, b) => axis(r.content, b, r.content, r.unit_stride),
        (a, 1) => axis(l.content, a, l.unit_stride, l.content),
        _ => None,
    }
}

/// True if the two sides' areas have the same bytes per token and head, and run lengths that fit each other.
pub(super) fn units_fit(local: &Area, remote: &Area) -> bool {
    units(local, remote).is_some()
}

/// The base in either region of each paged token run of a pair, and the contiguous bytes and axes from there.
fn common<'a>(pair: &'a AreaPair<'_>, runs: &'a [TokenRun]) -> impl Iterator<Item = ([u64; 2], u64, Axes<2>)> + 'a {
    let (local, remote) = (&*pair.local, &*pair.remote);
    let base = |area: &Area| {
        let skipped = u64::from(pair.first_head.saturating_sub(area.first_head));
        area.offset.wrapping_add(skipped.wrapping_mul(area.head_stride))
    };
    let bases = [base(local), base(remote)];
    let unit = units(local, remote);
    paged(pair, runs).filter_map(move |(at, tokens)| {
        let (content, unit) = unit?;
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        let axes = [
            (pair.heads, [local.head_stride, remote.head_stride]),
            (1, [0, 0]),
            (tokens, [local.token_stride, remote.token_stride]),
            unit,
        ];
        Some(([bases[0].wrapping_add(at[0]), bases[1].wrapping_add(at[1])], content, axes))
    })
}

/// How many runs [`intersect`] makes of a pair before merging. Saturates.
pub(super) fn runs(pair: &AreaPair<'_>, tokens: &[TokenRun]) -> u64 {
    common(pair, tokens).fold(0u64, |sum, (_, content, axes)| sum.saturating_add(run_count(content, axes)))
}

/// Cuts the intersection of a pair into runs that are contiguous on both sides.
pub(super) fn intersect<'a>(
    pair: &'a AreaPair<'_>,
    tokens: &'a [TokenRun],
    steps: BlockStrides,
) -> impl Iterator<Item = Segment> + 'a {
    let (local_region, remote_region) = (pair.local.region, pair.remote.region);
    common(pair, tokens).flat_map(move |(base, content, axes)| {
        let (len, pieces) = fold(base, content, axes);
        pieces.map(move |Piece([local_offset, remote_offset])| Segment {
            list: steps.list,
            local_region,
            remote_region,
            local_offset,
            remote_offset,
            local_stride: steps.local,
            remote_stride: steps.remote,
            len,
        })
    })
}

/// Sorts segments by list, regions and local offset, and merges those that are neighbours inside a block on both sides.
pub(super) fn merged(mut all: Vec<Segment>) -> Vec<Segment> {
    all.sort_unstable_by_key(|s| {
        (s.list, s.local_region, s.remote_region, s.local_stride, s.remote_stride, s.local_offset)
    });
    all.dedup_by(|next, previous| merge(previous, next));
    all
}

/// Appends `next` to `previous` if it continues it on both sides within one block's stride.
fn merge(previous: &mut Segment, next: &Segment) -> bool {
    let same = (previous.list, previous.local_region, previous.remote_region, previous.local_stride)
        == (next.list, next.local_region, next.remote_region, next.local_stride)
        && previous.remote_stride == next.remote_stride;
    let continues = previous.local_offset.checked_add(previous.len) == Some(next.local_offset)
        && previous.remote_offset.checked_add(previous.len) == Some(next.remote_offset);
    match previous.len.checked_add(next.len) {
        Some(len) if same && continues && len <= previous.local_stride && len <= previous.remote_stride => {
            previous.len = len;
            true
        }
        _ => false,
    }
}
