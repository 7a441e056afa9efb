//! Finds places of a geometry that are the same byte.
//!
//! A run of `len` bytes that repeats `num_blocks` times with stride `S` is a rectangle in a plane of `S` columns: columns
//! `start % S` to `start % S + len`, rows `start / S` to `start / S + num_blocks` (cut in two where it crosses the last
//! column). So runs of one stride overlap exactly where their rectangles do, and one sweep over the columns finds that
//! in O(n log n), whatever the number of blocks.

use std::collections::{BTreeMap, BTreeSet};

use super::{Area, Geometry, fold};
use crate::error::{Error, ErrorKind, Result};

/// A run at all of its blocks.
struct Rectangle<'a> {
    column: u64,
    end_column: u64,
    row: u64,
    end_row: u64,
    area: &'a Area,
}

/// Refuses overlap within a group, and overlap of two groups other than block by block; gives the pairs of groups that
/// overlap so. The geometry's bounds must have been checked.
pub(super) fn check(geometry: &Geometry) -> Result<Vec<(u32, u32)>> {
    let mut areas: Vec<&Area> = geometry.areas.iter().collect();
    areas.sort_by_key(|area| (area.region, area.offset));
    let mut shared = BTreeSet::new();
    let mut cluster: Vec<&Area> = Vec::new();
    // The area of the cluster that ends last.
    let mut last: Option<&Area> = None;
    for area in areas {
        let touches = last.filter(|last| last.region == area.region && last.end() > Some(area.offset));
        match touches {
            Some(last) if last.block_stride != area.block_stride => {
                return Err(Error::new(
                    ErrorKind::AlreadyExists,
                    format!(
                        "{last} and {area} lie in the same part of region {} with block strides {} and {}; areas that \
                         interleave must have the same block stride",
                        area.region, last.block_stride, area.block_stride
                    ),
                ));
            }
            Some(_) => {}
            None => {
                sweep(&cluster, &mut shared)?;
                cluster.clear();
            }
        }
        cluster.push(area);
        if touches.is_none_or(|last| area.end() > last.end()) {
            last = Some(area);
        }
    }
    sweep(&cluster, &mut shared)?;
    Ok(shared.into_iter().collect())
}

fn rectangles<'a>(areas: &[&'a Area]) -> Vec<Rectangle<'a>> {
    let mut all = Vec::new();
    for &area in areas {
        let stride = area.block_stride.max(1);
        let (len, pieces) = fold([area.offset], area.content, area.axes());
        for piece in pieces {
            let [start] = piece.0;
            let (row, column) = (start / stride, start % stride);
            let end = column.saturating_add(len);
            let rows = u64::from(area.num_blocks);
            let mut add = |column, end_column, row: u64| {
                all.push(Rectangle { column, end_column, row, end_row: row.saturating_add(rows), area });
            };
            add(column, end.min(stride), row);
            if end > stride {
                add(0, end - stride, row.saturating_add(1));
            }
        }
    }
    all
}

fn sweep(areas: &[&Area], shared: &mut BTreeSet<(u32, u32)>) -> Result<()> {
    let all = rectangles(areas);
    // Columns in order; at the same column, what ends there goes before what begins.
    let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(all.len().saturating_mul(2));
    for (index, r) in all.iter().enumerate() {
        events.push((r.column, true, index));
        events.push((r.end_column, false, index));
    }
    events.sort_unstable();
    // What crosses the current column, by first row. Several with the same first row are of different groups.
    let mut active: BTreeMap<u64, Vec<&Rectangle<'_>>> = BTreeMap::new();
    for (_, begins, index) in events {
        let Some(new) = all.get(index) else { continue };
        if !begins {
            if let Some(here) = active.get_mut(&new.row) {
                here.retain(|other| !std::ptr::eq(*other, new));
                if here.is_empty() {
                    active.remove(&new.row);
                }
            }
            continue;
        }
        let before = active.range(..new.row).next_back().and_then(|(_, here)| here.iter().max_by_key(|r| r.end_row));
        if let Some(other) = before.filter(|other| other.end_row > new.row) {
            return Err(collision(other.area, new.area));
        }
        let after = active.range(new.row.saturating_add(1)..).next().and_then(|(_, here)| here.first());
        if let Some(other) = after.filter(|other| new.end_row > other.row) {
            return Err(collision(other.area, new.area));
        }
        let here = active.entry(new.row).or_default();
        for other in &*here {
            let (a, b) = (other.area.group, new.area.group);
            if a == b {
                return Err(collision(other.area, new.area));
            }
            shared.insert((a.min(b), a.max(b)));
        }
        here.push(new);
    }
    Ok(())
}

fn collision(a: &Area, b: &Area) -> Error {
    let message = if std::ptr::eq(a, b) {
        format!(
            "{a} lies on itself in region {}: its strides (block {}, head {}, token {}) and content ({}) give two \
             places the same byte",
            a.region, a.block_stride, a.head_stride, a.token_stride, a.content
        )
    } else if a.group == b.group {
        format!(
            "{a} and {b} of KV-cache group {} share bytes in region {}; list memory that two layers share once",
            a.group, a.region
        )
    } else {
        format!(
            "{a} of KV-cache group {} and {b} of group {} share bytes of different block ids in region {}; groups may \
             share memory only block by block",
            a.group, b.group, a.region
        )
    };
    Error::new(ErrorKind::AlreadyExists, message)
}
