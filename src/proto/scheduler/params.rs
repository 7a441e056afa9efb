//! `kv_transfer_params` from outside: what is missing, what is malformed, and what a request's blocks pair up with.

use super::SchedulerConfig;
use crate::error::{Error, Result};
use crate::proto::geometry::{Group, GroupKind};
use crate::proto::ids::{EngineId, Incarnation, RequestId};
use crate::proto::wire::{Blocks, Remote, TransferParams};

/// The lease assumed when the params name none: vLLM's own default for a hand-over.
const DEFAULT_LEASE_MS: u64 = 30_000;

/// The longest host name of the DNS (RFC 1035), which also holds any numeric address.
const MAX_HOST_BYTES: usize = 255;

fn bad(request: &RequestId, text: impl std::fmt::Display) -> Error {
    Error::invalid(format!("kv_transfer_params of request {request}: {text}"))
}

/// Refuses params that ask for both roles at once.
pub(super) fn check_roles(request: &RequestId, params: &TransferParams) -> Result<()> {
    if params.do_remote_prefill && params.do_remote_decode {
        return Err(bad(
            request,
            "do_remote_prefill and do_remote_decode are both true; a prefill engine is sent do_remote_decode, a decode \
             engine do_remote_prefill",
        ));
    }
    Ok(())
}

/// Where the request was prefilled. Names every missing key at once.
pub(super) fn remote(request: &RequestId, params: &TransferParams) -> Result<Remote> {
    check_roles(request, params)?;
    let missing: Vec<&str> = [
        ("remote_engine_id", params.remote_engine_id.is_none()),
        ("remote_request_id", params.remote_request_id.is_none()),
        ("remote_host", params.remote_host.is_none()),
        ("remote_port", params.remote_port.is_none()),
        ("remote_block_ids", params.remote_block_ids.is_none()),
    ]
    .into_iter()
    .filter_map(|(key, missing)| missing.then_some(key))
    .collect();
    let (Some(engine), Some(remote_request), Some(host), Some(port), Some(_)) = (
        params.remote_engine_id.as_ref(),
        params.remote_request_id.as_ref(),
        params.remote_host.as_ref(),
        params.remote_port,
        params.remote_block_ids.as_ref(),
    ) else {
        return Err(bad(
            request,
            format_args!(
                "do_remote_prefill needs {}, which {} missing; the proxy must pass on the kv_transfer_params of the \
                 prefill engine's answer unchanged",
                missing.join(", "),
                if missing.len() == 1 { "is" } else { "are" }
            ),
        ));
    };
    if host.is_empty() || host.len() > MAX_HOST_BYTES {
        return Err(bad(
            request,
            format_args!("remote_host: expected 1 to {MAX_HOST_BYTES} bytes, got {}", host.len()),
        ));
    }
    let port = match u16::try_from(port) {
        Ok(port) if port > 0 => port,
        _ => return Err(bad(request, format_args!("remote_port: expected 1 to 65535, got {port}"))),
    };
    let lease_ms = match params.remote_lease_ms {
        None => DEFAULT_LEASE_MS,
        Some(ms) => match u64::try_from(ms) {
            Ok(ms @ 1..=864_000_000) => ms,
            _ => {
                return Err(bad(
                    request,
                    format_args!("remote_lease_ms: expected 1 to 864000000 milliseconds, got {ms}"),
                ));
            }
        },
    };
    let lease_id = match params.remote_lease_id {
        None => 0,
        Some(id) => match u64::try_from(id) {
            Ok(id) if id > 0 => id,
            _ => return Err(bad(request, format_args!("remote_lease_id: expected 1 or more, got {id}"))),
        },
    };
    if let Some(mode) = &params.transfer_mode
        && mode != "pull"
    {
        return Err(bad(
            request,
            format_args!("transfer_mode: expected \"pull\", got {mode:?}; run kvferry on both engines"),
        ));
    }
    let incarnation = match &params.remote_incarnation {
        None => None,
        Some(text) => match u64::from_str_radix(text, 16) {
            Ok(number) if number != 0 && text.len() == 16 && !text.starts_with('+') => Some(Incarnation(number)),
            _ => {
                return Err(bad(
                    request,
                    format_args!("remote_incarnation: expected 16 hexadecimal digits, not all 0, got {text:?}"),
                ));
            }
        },
    };
    Ok(Remote {
        engine: EngineId::new(engine).map_err(|e| bad(request, format_args!("remote_engine_id: {e}")))?,
        incarnation,
        request: RequestId::new(remote_request).map_err(|e| bad(request, format_args!("remote_request_id: {e}")))?,
        host: host.clone(),
        port,
        lease_ms,
        lease_id,
    })
}

/// The producer's block ids per KV-cache group.
pub(super) fn remote_blocks(
    request: &RequestId,
    params: &TransferParams,
    config: &SchedulerConfig,
) -> Result<Vec<Vec<u32>>> {
    let lists = params.remote_block_ids.as_deref().unwrap_or_default();
    if lists.len() != config.groups.len() {
        return Err(bad(
            request,
            format_args!(
                "remote_block_ids: expected one list for each of the {} KV-cache groups, got {}; run the same model \
                 with the same cache settings on both engines",
                config.groups.len(),
                lists.len()
            ),
        ));
    }
    let mut groups = Vec::with_capacity(lists.len());
    for (g, list) in lists.iter().enumerate() {
        let mut ids = Vec::with_capacity(list.len());
        for (i, &id) in list.iter().enumerate() {
            ids.push(u32::try_from(id).map_err(|_| {
                bad(
                    request,
                    format_args!("remote_block_ids[{g}][{i}]: expected a block id from 0 to {}, got {id}", u32::MAX),
                )
            })?);
        }
        groups.push(ids);
    }
    Ok(groups)
}

/// Tokens per entry of a block list.
pub(super) fn tokens_per_block(config: &SchedulerConfig, group: &Group) -> u64 {
    u64::from(group.block_size).saturating_mul(u64::from(config.dcp_size)).max(1)
}

/// How many blocks at the end of a list can lie in the window; `None` where every block counts. One more than the
/// window fills, because the window need not start at a block's first token.
fn window_blocks(group: &Group) -> Option<usize> {
    match group.kind {
        GroupKind::SlidingWindow { window } => {
            usize::try_from(u64::from(window).div_ceil(u64::from(group.block_size.max(1))).saturating_add(1)).ok()
        }
        GroupKind::Full | GroupKind::Latent | GroupKind::State => None,
    }
}

/// The end of `ids` that lies in the group's window.
pub(super) fn in_window<'a>(group: &Group, ids: &'a [u32]) -> &'a [u32] {
    match window_blocks(group) {
        Some(n) => ids.get(ids.len().saturating_sub(n)..).unwrap_or(ids),
        None => ids,
    }
}

/// Checks that what the producer holds ends where this request's prompt ends: lists are paired from their ends.
pub(super) fn check_tokens(
    request: &RequestId,
    params: &TransferParams,
    config: &SchedulerConfig,
    prompt_tokens: u64,
) -> Result<()> {
    let held = match params.remote_num_tokens {
        None => None,
        Some(n) => Some(
            u64::try_from(n)
                .map_err(|_| bad(request, format_args!("remote_num_tokens: expected 0 or more, got {n}")))?,
        ),
    };
    if let Some(held) = held
        && held < prompt_tokens
    {
        return Err(bad(
            request,
            format_args!(
                "remote_num_tokens: the producer holds {held} tokens, the prompt has {prompt_tokens}; send both \
                 engines the same prompt"
            ),
        ));
    }
    let blocks = remote_blocks(request, params, config)?;
    for (g, (group, ids)) in config.groups.iter().zip(&blocks).enumerate() {
        let per_block = tokens_per_block(config, group);
        let needed = prompt_tokens.div_ceil(per_block);
        if held.is_some_and(|held| held.div_ceil(per_block) != needed) {
            return Err(bad(
                request,
                format_args!(
                    "remote_num_tokens: the producer holds {} tokens, the prompt has {prompt_tokens}, which ends in \
                     another block of KV-cache group {g} ({per_block} tokens a block); send the prefill engine the \
                     same prompt with max_tokens 1",
                    held.unwrap_or(0)
                ),
            ));
        }
        if window_blocks(group).is_none() && ids.len() as u64 != needed {
            return Err(bad(
                request,
                format_args!(
                    "remote_block_ids[{g}]: expected {needed} blocks of {per_block} tokens for a prompt of \
                     {prompt_tokens} tokens, got {}; both engines need the same prompt and block size",
                    ids.len()
                ),
            ));
        }
    }
    Ok(())
}

/// Pairs the blocks to fill with the producer's, per group from the ends of the lists. The error is for people.
pub(super) fn pair(
    config: &SchedulerConfig,
    params: &TransferParams,
    local: &[Blocks],
    remote: &[Vec<u32>],
    external_tokens: u64,
) -> Result<(Vec<Blocks>, Vec<Blocks>), String> {
    let held = params.remote_num_tokens.and_then(|n| u64::try_from(n).ok());
    let is_null = |id: u32| config.null_block == Some(id);
    let (mut ours, mut theirs) = (Vec::with_capacity(local.len()), Vec::with_capacity(local.len()));
    for (g, ((group, local), remote)) in config.groups.iter().zip(local).zip(remote).enumerate() {
        let (here, there) = (in_window(group, local.ids()), in_window(group, remote));
        if window_blocks(group).is_none() {
            let skipped = there.len().checked_sub(here.len()).ok_or_else(|| {
                format!("KV-cache group {g}: {} blocks are to be filled, the producer has {}", here.len(), there.len())
            })? as u64;
            // Both lists must end at the same token: what is not loaded lies in the blocks before the local ones.
            let expected = held.map(|held| held.saturating_sub(external_tokens) / tokens_per_block(config, group));
            if let Some(expected) = expected
                && expected != skipped
            {
                return Err(format!(
                    "KV-cache group {g}: loading {external_tokens} of the producer's {} tokens skips {expected} \
                     blocks, but {} blocks to fill and {} of the producer leave {skipped}",
                    held.unwrap_or(0),
                    here.len(),
                    there.len()
                ));
            }
        }
        let (mut l, mut r): (Vec<u32>, Vec<u32>) = (Vec::new(), Vec::new());
        let mut partners = there.iter().rev();
        for &id in here.iter().rev() {
            let partner = partners.next().copied();
            if is_null(id) {
                continue;
            }
            match partner {
                Some(other) if !is_null(other) => {
                    l.push(id);
                    r.push(other);
                }
                _ => {
                    return Err(format!(
                        "KV-cache group {g}: the producer has no block for local block {id}; it kept {} blocks, {} \
                         are to be filled",
                        there.iter().filter(|&&id| !is_null(id)).count(),
                        here.iter().filter(|&&id| !is_null(id)).count()
                    ));
                }
            }
        }
        l.reverse();
        r.reverse();
        ours.push(Blocks::from(l));
        theirs.push(Blocks::from(r));
    }
    Ok((ours, theirs))
}
