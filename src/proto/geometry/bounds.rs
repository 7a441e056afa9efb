//! Limits, indices and ends of a geometry, and the cutting of an area into contiguous runs.

use std::collections::HashSet;

use super::{Area, Geometry, GroupKind, MAX_AREAS, MAX_AXIS, MAX_GROUPS, MAX_LAYER_BYTES, MAX_PART_BYTES, MAX_RUNS};
use crate::error::{Error, ErrorKind, Result};
use crate::proto::wire::RegionMetadata;

/// Where a contiguous run starts, in each of `N` address maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece<const N: usize>(pub [u64; N]);

/// Two axes: how many steps, and the bytes of one in each of `N` address maps.
pub(crate) type Axes<const N: usize> = [(u32, [u64; N]); 2];

/// Cuts `content` bytes that repeat along two axes of (count, stride in each map) into the fewest runs that are
/// contiguous in all `N` maps: the length of a run, and where each starts. Arithmetic wraps; checked areas do not.
pub(crate) fn fold<const N: usize>(
    base: [u64; N],
    content: u64,
    axes: Axes<N>,
) -> (u64, impl Iterator<Item = Piece<N>>) {
    let (len, axes) = folded(content, axes);
    let [(outer, outer_strides), (inner, inner_strides)] = axes;
    let pieces = (0..u64::from(outer)).flat_map(move |i| {
        (0..u64::from(inner)).map(move |j| {
            let mut at = base;
            for ((at, outer), inner) in at.iter_mut().zip(outer_strides).zip(inner_strides) {
                *at = at.wrapping_add(i.wrapping_mul(outer)).wrapping_add(j.wrapping_mul(inner));
            }
            Piece(at)
        })
    });
    (len, pieces)
}

/// The run length of [`fold`], and the axes that are left, the contiguous ones with count 1.
pub(crate) fn folded<const N: usize>(content: u64, mut axes: Axes<N>) -> (u64, Axes<N>) {
    let mut len = content;
    for _ in 0..axes.len() {
        for (count, strides) in &mut axes {
            if *count > 1 && strides.iter().all(|&stride| stride == len) {
                len = len.wrapping_mul(u64::from(*count));
                *count = 1;
            }
        }
    }
    (len, axes)
}

impl Area {
    /// The head and token axes, for [`fold`].
    pub(crate) fn axes(&self) -> Axes<1> {
        [(self.heads, [self.head_stride]), (self.tokens, [self.token_stride])]
    }
}

fn over(what: &str, found: usize, limit: usize) -> Result<()> {
    if found > limit {
        return Err(Error::new(
            ErrorKind::Exhausted,
            format!("the geometry has {found} {what}, at most {limit} can be"),
        ));
    }
    Ok(())
}

/// Everything but overlap.
pub(super) fn check(geometry: &Geometry, regions: &[RegionMetadata]) -> Result<()> {
    over("KV-cache groups", geometry.groups.len(), MAX_GROUPS)?;
    over("areas", geometry.areas.len(), MAX_AREAS)?;
    for (index, group) in geometry.groups.iter().enumerate() {
        if group.block_size == 0 || group.block_size > MAX_AXIS {
            return Err(Error::invalid(format!(
                "KV-cache group {index} has block size {}, expected 1 to {MAX_AXIS} tokens",
                group.block_size
            )));
        }
        if group.kind == GroupKind::State && group.block_size != 1 {
            return Err(Error::invalid(format!(
                "KV-cache group {index} holds a state and has block size {}, expected 1: a state has no token positions",
                group.block_size
            )));
        }
        if group.kind == (GroupKind::SlidingWindow { window: 0 }) {
            return Err(Error::invalid(format!("KV-cache group {index} has a sliding window of 0 tokens")));
        }
    }
    let mut names = HashSet::with_capacity(geometry.areas.len());
    let mut runs = 0u64;
    for area in &geometry.areas {
        check_area(area, geometry, regions)?;
        if !names.insert((&*area.layer, &*area.part)) {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                format!("{area} is in the geometry twice; a rank holds every layer and part once"),
            ));
        }
        let (_, [(outer, _), (inner, _)]) = folded(area.content, area.axes());
        runs = runs.saturating_add(u64::from(outer).saturating_mul(inner.into()));
        if runs > MAX_RUNS {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!(
                    "the geometry falls apart into more than {MAX_RUNS} contiguous runs per block; use a layout that \
                     keeps a head's or a token's bytes together"
                ),
            ));
        }
    }
    Ok(())
}

fn check_area(area: &Area, geometry: &Geometry, regions: &[RegionMetadata]) -> Result<()> {
    if area.layer.is_empty() || area.layer.len() > MAX_LAYER_BYTES {
        return Err(Error::invalid(format!(
            "a layer name has 1 to {MAX_LAYER_BYTES} bytes, this one has {}",
            area.layer.len()
        )));
    }
    if area.part.is_empty() || area.part.len() > MAX_PART_BYTES {
        return Err(Error::invalid(format!(
            "layer {:?}: a part name has 1 to {MAX_PART_BYTES} bytes, this one has {}",
            area.layer,
            area.part.len()
        )));
    }
    if area.group as usize >= geometry.groups.len() {
        return Err(Error::invalid(format!(
            "{area} names KV-cache group {}, the geometry has {}",
            area.group,
            geometry.groups.len()
        )));
    }
    let Some(region) = regions.get(area.region as usize) else {
        return Err(Error::invalid(format!(
            "{area} names region {}, the agent exports {}; register the memory first",
            area.region,
            regions.len()
        )));
    };
    let counts = [("num_blocks", area.num_blocks), ("heads", area.heads), ("tokens", area.tokens)];
    let sizes = [("content", area.content), ("block_stride", area.block_stride)];
    let sizes = sizes.into_iter().chain([
        // With one head or token its stride is never used.
        ("head_stride", if area.heads > 1 { area.head_stride } else { 1 }),
        ("token_stride", if area.tokens > 1 { area.token_stride } else { 1 }),
    ]);
    if let Some((name, _)) = counts.map(|(n, v)| (n, u64::from(v))).into_iter().chain(sizes).find(|&(_, v)| v == 0) {
        return Err(Error::invalid(format!("{area} has {name} 0, expected at least 1")));
    }
    for (name, value) in [("heads", area.total_heads), ("tokens", area.tokens)] {
        if value > MAX_AXIS {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("{area} has {value} {name}, at most {MAX_AXIS} can be"),
            ));
        }
    }
    if area.first_head.checked_add(area.heads).is_none_or(|end| end > area.total_heads) {
        return Err(Error::invalid(format!(
            "{area} holds {} heads from head {}, the model has {}",
            area.heads, area.first_head, area.total_heads
        )));
    }
    let (run, _) = folded(area.content, area.axes());
    if area.end().is_none_or(|end| end > region.len) {
        let end = area.end().map_or("beyond 64 bits".into(), |end| format!("at byte {end}"));
        return Err(Error::new(
            ErrorKind::OutOfRange,
            format!(
                "{area} ends {end} of region {}, which has {} bytes (offset {}, {} blocks with stride {}, {} heads with \
                 stride {}, {} tokens with stride {}, content {})",
                area.region,
                region.len,
                area.offset,
                area.num_blocks,
                area.block_stride,
                area.heads,
                area.head_stride,
                area.tokens,
                area.token_stride,
                area.content
            ),
        ));
    }
    if run > area.block_stride {
        return Err(Error::invalid(format!(
            "{area} has {run} contiguous bytes in a block and block stride {}: blocks would lie on each other",
            area.block_stride
        )));
    }
    Ok(())
}
