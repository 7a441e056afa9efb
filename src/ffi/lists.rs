//! Block lists as the C side passes them: one flat array of ids, and where each list ends.

use super::boundary::slice;
use crate::error::{Error, Result};
use crate::proto::wire::Blocks;

/// The most lists in one call. A model has one per KV-cache group, of which even hybrid models have a few tens.
const MAX_LISTS: usize = 65_536;

/// Checked offsets: list `i` is the ids from entry `i` to entry `i + 1`.
pub(super) struct Offsets<'a>(&'a [u64]);

impl<'a> Offsets<'a> {
    /// The `count + 1` offsets at `pointer`; it may be null when `count` is 0.
    ///
    /// # Safety
    /// As for [`slice()`], with `count + 1` elements.
    pub(super) unsafe fn new(pointer: *const u64, count: usize) -> Result<Self> {
        if count == 0 {
            return Ok(Offsets(&[]));
        }
        if count > MAX_LISTS {
            return Err(Error::invalid(format!("{count} block lists were given, the most is {MAX_LISTS}")));
        }
        // SAFETY: this function's contract.
        let offsets = unsafe { slice(pointer, count.saturating_add(1), "list_offsets")? };
        let ascending = offsets.is_sorted() && offsets.first() == Some(&0);
        if !ascending {
            return Err(Error::invalid("list_offsets must start with 0 and never descend"));
        }
        Ok(Offsets(offsets))
    }

    /// Cuts the flat array `ids`, which holds as many ids as the last offset says, into its lists.
    ///
    /// # Safety
    /// As for [`slice()`], with the last offset's number of elements.
    pub(super) unsafe fn cut(&self, ids: *const u32, name: &str) -> Result<Vec<Blocks>> {
        let total = usize::try_from(self.0.last().copied().unwrap_or(0))
            .map_err(|_| Error::invalid("list_offsets exceeds the address space"))?;
        // SAFETY: this function's contract.
        let ids = unsafe { slice(ids, total, name)? };
        let bounds = self.0.windows(2).map(|pair| match pair {
            [start, end] => {
                (usize::try_from(*start).unwrap_or(usize::MAX), usize::try_from(*end).unwrap_or(usize::MAX))
            }
            _ => (0, 0),
        });
        bounds
            .map(|(start, end)| ids.get(start..end).map(Blocks::from))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| Error::invalid("list_offsets leaves the array of ids"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_cut_at_their_offsets() {
        let (offsets, ids) = ([0u64, 2, 2, 5], [7u32, 8, 1, 2, 3]);
        // SAFETY: live arrays of the stated lengths.
        let lists = unsafe { Offsets::new(offsets.as_ptr(), 3).unwrap().cut(ids.as_ptr(), "ids").unwrap() };
        assert_eq!(lists.iter().map(Blocks::ids).collect::<Vec<_>>(), [&[7, 8][..], &[], &[1, 2, 3]]);
        // SAFETY: null arrays of length 0.
        let none = unsafe { Offsets::new(std::ptr::null(), 0).unwrap().cut(std::ptr::null(), "ids").unwrap() };
        assert!(none.is_empty());
    }

    #[test]
    fn bad_offsets_are_refused_before_the_ids_are_read() {
        for bad in [[1u64, 2], [2, 1]] {
            // SAFETY: a live array of two.
            assert!(unsafe { Offsets::new(bad.as_ptr(), 1) }.is_err(), "{bad:?}");
        }
        let far = [0u64, u64::MAX];
        // SAFETY: a live array of two; the ids are refused by their number before they are read.
        let refused = unsafe { Offsets::new(far.as_ptr(), 1).unwrap().cut([1u32].as_ptr(), "ids") };
        assert!(refused.unwrap_err().message().contains("address space"));
        // SAFETY: null is refused.
        assert!(unsafe { Offsets::new(std::ptr::null(), 1) }.is_err());
        // SAFETY: refused by its number.
        assert!(unsafe { Offsets::new(far.as_ptr(), usize::MAX) }.is_err());
    }
}
