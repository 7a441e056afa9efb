//! The intersection of two ranks' address maps, as segments.

use super::Segment;
use crate::proto::geometry::{Area, Axes, Piece, fold, folded};

/// The common heads and tokens of two areas of the same layer and part: the base in either region and the axes for
/// [`fold`]. The areas must agree in group, tokens and content: [`super::check_ranks`].
fn common(local: &Area, remote: &Area) -> ([u64; 2], u64, Axes<2>) {
    let first = local.first_head.max(remote.first_head);
    let end = |area: &Area| area.first_head.saturating_add(area.heads);
    let heads = end(local).min(end(remote)).saturating_sub(first);
    let base = |area: &Area| {
        area.offset.wrapping_add(u64::from(first.saturating_sub(area.first_head)).wrapping_mul(area.head_stride))
    };
    let tokens = local.tokens.min(remote.tokens);
    let axes = [(heads, [local.head_stride, remote.head_stride]), (tokens, [local.token_stride, remote.token_stride])];
    ([base(local), base(remote)], local.content.min(remote.content), axes)
}

/// How many runs [`segments`] makes of two areas before merging.
pub(super) fn runs(local: &Area, remote: &Area) -> u64 {
    let (_, content, axes) = common(local, remote);
    let (_, [(outer, _), (inner, _)]) = folded(content, axes);
    u64::from(outer).saturating_mul(inner.into())
}

/// What two areas have in common, cut into runs that are contiguous on both sides; nothing without common heads.
fn intersect(local: &Area, remote: &Area) -> impl Iterator<Item = Segment> {
    let (base, content, axes) = common(local, remote);
    let (len, pieces) = fold(base, content, axes);
    let (list, local_region, remote_region) = (local.group, local.region, remote.region);
    let (local_stride, remote_stride) = (local.block_stride, remote.block_stride);
    pieces.map(move |Piece([local_offset, remote_offset])| Segment {
        list,
        local_region,
        remote_region,
        local_offset,
        remote_offset,
        local_stride,
        remote_stride,
        len,
    })
}

/// The segments of all `pairs` of areas: cut where either side is not contiguous, merged where both are (within an
/// area, and across areas that are neighbours inside a block on both sides), sorted by list, regions and local offset.
pub(super) fn segments<'a>(pairs: impl Iterator<Item = (&'a Area, &'a Area)>) -> Vec<Segment> {
    let mut all: Vec<Segment> = pairs.flat_map(|(local, remote)| intersect(local, remote)).collect();
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
