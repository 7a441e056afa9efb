//! A rank's areas and regions.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{EngineSpec, GroupSpec, Layout, ModelSpec, PartSpec, Parts, heads_of};
use crate::geometry::{Area, GroupKind};
use crate::ids::RankId;

/// K and V of a group that consists of just these.
pub(super) fn k_and_v(group: &GroupSpec) -> Option<(&PartSpec, &PartSpec)> {
    match &*group.parts {
        [k, v] if k.name == "k" && v.name == "v" && group.kind != GroupKind::State => Some((k, v)),
        _ => None,
    }
}

/// The parts of a layer in one physical block: areas with offsets within it, each in one of several planes, and the
/// bytes of each plane.
#[derive(Default)]
struct Page {
    areas: Vec<(usize, Area)>,
    planes: Vec<u64>,
}

impl Page {
    /// Puts areas into the plane `plane`, from its end on.
    fn put(&mut self, plane: usize, bytes: u64, areas: impl IntoIterator<Item = Area>) {
        if self.planes.len() <= plane {
            self.planes.resize(plane + 1, 0);
        }
        let Some(end) = self.planes.get_mut(plane) else { return };
        for area in areas {
            self.areas.push((plane, Area { offset: end.saturating_add(area.offset), ..area }));
        }
        *end = end.saturating_add(bytes);
    }
}

/// An area of `heads` by `tokens` by `content` bytes without gaps, whose tokens the caller may not tell apart.
fn dense(part: &str, layout: Layout, state: bool, heads: u32, tokens: u32, content: u64) -> (u64, Area) {
    let heads_first = match layout {
        Layout::TokenMajor => false,
        Layout::Turned { .. } => state,
        Layout::HeadMajor | Layout::Whole => true,
    };
    let (h, t) = (u64::from(heads), u64::from(tokens));
    let bytes = h.saturating_mul(t).saturating_mul(content);
    let (head_stride, token_stride) =
        if heads_first { (t.saturating_mul(content), content) } else { (content, h.saturating_mul(content)) };
    let area = Area { part: part.to_owned(), heads, tokens, head_stride, token_stride, content, ..Area::default() };
    if layout == Layout::Whole && !state {
        return (bytes, Area { tokens: 1, content: head_stride, ..area });
    }
    (bytes, area)
}

/// One physical block of one layer.
fn page(spec: &EngineSpec, group: &GroupSpec, tokens: u32, rank: RankId) -> Page {
    let state = group.kind == GroupKind::State;
    let dcp = if state { 1 } else { spec.dcp.max(1) };
    let heads = |part: &PartSpec| heads_of(part.heads, rank.tp / dcp, spec.tp / dcp);
    let mut page = Page::default();
    match (k_and_v(group), spec.layout, spec.parts) {
        (Some((k, v)), Layout::Turned { element }, _) => {
            let (first_head, count) = heads(k);
            let (t, element) = (u64::from(tokens), element.max(1));
            let head_stride = t.saturating_mul(k.bytes.saturating_add(v.bytes));
            let common =
                Area { heads: count, first_head, total_heads: k.heads, head_stride, tokens, ..Area::default() };
            let turned = Area {
                part: k.name.clone(),
                token_stride: element,
                units: u32::try_from(k.bytes / element).unwrap_or(u32::MAX),
                unit_stride: t.saturating_mul(element),
                content: element,
                ..common.clone()
            };
            let plain = Area {
                part: v.name.clone(),
                offset: t.saturating_mul(k.bytes),
                token_stride: v.bytes,
                content: v.bytes,
                ..common
            };
            page.put(0, head_stride.saturating_mul(count.into()), [turned, plain]);
        }
        (Some((k, v)), layout, Parts::Packed) => {
            let (first_head, count) = heads(k);
            let (bytes, area) = dense("kv", layout, state, count, tokens, k.bytes.saturating_add(v.bytes));
            page.put(0, bytes, [Area { first_head, total_heads: k.heads, ..area }]);
        }
        (_, layout, parts) => {
            for (index, part) in group.parts.iter().enumerate() {
                let (first_head, count) = heads(part);
                let tokens = if state { part.positions } else { tokens };
                let (bytes, area) = dense(&part.name, layout, state, count, tokens, part.bytes);
                let plane = if parts == Parts::Regions { index } else { 0 };
                page.put(plane, bytes, [Area { first_head, total_heads: part.heads, ..area }]);
            }
        }
    }
    page
}

/// Distinguishes regions: group, layer's number in the group, plane; 0 where it does not.
type RegionKey = (usize, usize, usize);

/// The areas of the rank that holds `layers`, and the lengths of its regions. Arithmetic saturates; a geometry that comes
/// near that is not valid.
pub(super) fn lay_out(
    spec: &EngineSpec,
    model: &ModelSpec,
    rank: RankId,
    layers: &Range<u32>,
) -> (Vec<Area>, Vec<u64>) {
    let mut all: Vec<(RegionKey, Area)> = Vec::new();
    let mut strides: BTreeMap<RegionKey, u64> = BTreeMap::new();
    for (index, group) in model.groups.iter().enumerate() {
        let state = group.kind == GroupKind::State;
        let size = spec.block_size_of(index).unwrap_or(1);
        let pages = if state { 1 } else { spec.pages.max(1) };
        let page = page(spec, group, size / pages, rank);
        let own: Vec<u32> = group.layers.iter().copied().filter(|layer| layers.contains(layer)).collect();
        let slots = if spec.layers_in_block { own.len() as u64 } else { 1 };
        for (number, &layer) in own.iter().enumerate() {
            for (plane, area) in &page.areas {
                let slot = if spec.layers_in_block { 0 } else { number };
                let key = (if spec.shared_groups { 0 } else { index }, slot, *plane);
                let bytes = page.planes.get(*plane).copied().unwrap_or(0);
                let page_stride = bytes.saturating_mul(slots);
                let before = if spec.layers_in_block { bytes.saturating_mul(number as u64) } else { 0 };
                let stride = strides.entry(key).or_default();
                *stride = (*stride).max(page_stride.saturating_mul(pages.into()));
                let area = Area {
                    layer: group.layer_name(layer),
                    group: index as u32,
                    offset: spec.lead.saturating_add(before).saturating_add(area.offset),
                    num_blocks: spec.num_blocks,
                    pages,
                    page_stride: if pages > 1 { page_stride } else { 0 },
                    ..area.clone()
                };
                all.push((key, area));
            }
        }
    }
    let numbers: BTreeMap<RegionKey, u32> = strides.keys().copied().zip(0..).collect();
    let lens = strides.values().map(|stride| {
        let block = stride.saturating_add(spec.gap);
        spec.lead.saturating_add(block.saturating_mul(spec.num_blocks.into()))
    });
    let lens: Vec<u64> = lens.collect();
    let areas = all.into_iter().map(|(key, area)| Area {
        region: numbers.get(&key).copied().unwrap_or(u32::MAX),
        block_stride: strides.get(&key).copied().unwrap_or(0).saturating_add(spec.gap),
        ..area
    });
    (areas.collect(), lens)
}
