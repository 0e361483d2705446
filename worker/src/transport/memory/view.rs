//! A reader's view of another process's arena: read-only, checked against what that process claims of it.
#![allow(unsafe_code)]

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::ProtFlags;
use thiserror::Error;

use super::header::{Cell, Seen};
use super::{Mapping, Shape};
use crate::transport::checksum;

/// Why a file was not taken for an arena.
#[derive(Debug, Error)]
pub enum ViewError {
    /// A reader would die on memory that its owner takes away.
    #[error("the arena's file can shrink under its reader: its seals are missing")]
    Unsealed,
    /// Shorter than its owner says.
    #[error("the arena's file has {found} bytes, its owner says {claimed}")]
    Short {
        /// What it has.
        found: u64,
        /// What was said.
        claimed: usize,
    },
    /// The system refuses.
    #[error("the arena's file cannot be mapped: {0}")]
    System(#[from] io::Error),
}

/// A view.
pub struct View {
    mapping: Arc<Mapping>,
    shape: Shape,
    /// Of the file: another one is another arena.
    identity: (u64, u64),
}

impl fmt::Debug for View {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("View")
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

/// Which file this is.
///
/// # Errors
/// What the system says.
pub fn identity(file: impl AsFd) -> io::Result<(u64, u64)> {
    let stat = fstat(file)?;
    Ok((stat.st_dev, stat.st_ino))
}

impl View {
    /// Maps `file`, which its owner says has `shape`.
    ///
    /// # Errors
    /// [`ViewError`]: it is no arena of that shape, or it could become a shorter one.
    pub fn map(file: impl AsFd, shape: Shape) -> Result<Self, ViewError> {
        let seals = fcntl_get_seals(&file).map_err(io::Error::from)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(ViewError::Unsealed);
        }
        let stat = fstat(&file).map_err(io::Error::from)?;
        let found = u64::try_from(stat.st_size).unwrap_or(0);
        if found < shape.total() as u64 {
            return Err(ViewError::Short {
                found,
                claimed: shape.total(),
            });
        }
        let mapping = Mapping::shared(file.as_fd(), shape.total(), ProtFlags::READ)?;
        Ok(Self {
            mapping: Arc::new(mapping),
            shape,
            identity: (stat.st_dev, stat.st_ino),
        })
    }

    /// How it lies in its file.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Of the file.
    pub fn identity(&self) -> (u64, u64) {
        self.identity
    }

    fn cell(&self, index: u32) -> Option<&Cell> {
        self.shape.header_at(index).map(|at| self.mapping.cell(at))
    }

    /// What lies beside a piece now. `None` when there is no such piece, or it is just being changed.
    pub fn header(&self, index: u32) -> Option<Seen> {
        self.cell(index)?.read()
    }

    /// Whether the piece is untouched since `seen`.
    pub fn still(&self, index: u32, seen: &Seen) -> bool {
        self.cell(index).is_some_and(|cell| cell.still(seen))
    }

    /// Copies a piece, and returns the checksum of what was copied if it is `summed`. Without a piece or a `target` of that size:
    /// `None`. The owner may change the piece meanwhile: ask [`Self::still`] before using the bytes.
    pub fn copy(&self, index: u32, target: &mut [u8], summed: bool) -> Option<Option<u64>> {
        let at = self.shape.piece_at(index)?;
        if target.len() != self.shape.piece_bytes() {
            return None;
        }
        // SAFETY: `shape` was checked against the file's size, which cannot shrink, so the range is mapped; it is another mapping than
        // any that `target` can lie in, since this one cannot be written. The owner's writes race with these reads as a device's
        // would: no reference to the bytes is made, and they count for nothing until the header is seen unchanged.
        unsafe {
            let source = self.mapping.address.add(at).as_ptr();
            if summed {
                return Some(Some(checksum::copy(source, target)));
            }
            std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len());
        }
        Some(None)
    }
}

#[cfg(test)]
mod tests {
    use baton_protocol::header::BlockHeader;
    use baton_protocol::ids::Generation;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::super::Arena;
    use super::*;

    fn shape(pieces: u32) -> Shape {
        Shape::new(pieces, 8192).expect("small")
    }

    #[test]
    fn what_its_owner_writes_is_read() {
        let (arena, mut pieces) = Arena::new(shape(3)).expect("memory");
        let view = View::map(arena.file().expect("memfd"), shape(3)).expect("an arena");
        assert_eq!(view.header(1), None);
        for (byte, at) in pieces[1].bytes_mut().iter_mut().zip(0..) {
            *byte = at as u8 ^ 0x5a;
        }
        let header = BlockHeader {
            generation: Generation(4),
            ..BlockHeader::default()
        };
        arena.header(1).expect("there").publish(&header);
        let seen = view.header(1).expect("published");
        assert_eq!(seen.header, header);
        let mut copy = vec![0; 8192];
        let sum = view.copy(1, &mut copy, true);
        assert!(view.still(1, &seen));
        assert_eq!(sum, Some(Some(baton_protocol::checksum::checksum(&copy))));
        assert_eq!(copy, pieces[1].bytes());
        let mut unsummed = vec![0; 8192];
        assert_eq!(view.copy(1, &mut unsummed, false), Some(None));
        assert_eq!(unsummed, copy);
        arena.header(1).expect("there").retract();
        assert!(!view.still(1, &seen));
    }

    #[test]
    fn nothing_is_read_beside_the_arena() {
        let (arena, _pieces) = Arena::new(shape(3)).expect("memory");
        let view = View::map(arena.file().expect("memfd"), shape(3)).expect("an arena");
        assert_eq!(view.copy(3, &mut [0; 8192], true), None);
        assert_eq!(view.copy(u32::MAX, &mut [0; 8192], false), None);
        assert_eq!(view.copy(0, &mut [0; 8191], false), None);
        assert_eq!(view.header(3), None);
    }

    #[test]
    fn a_file_that_can_shrink_or_is_too_short_is_refused() {
        let loose =
            memfd_create("loose", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memfd");
        ftruncate(&loose, shape(3).total() as u64).expect("grows");
        assert!(matches!(
            View::map(&loose, shape(3)),
            Err(ViewError::Unsealed)
        ));
        let (arena, _pieces) = Arena::new(shape(3)).expect("memory");
        let lie = View::map(arena.file().expect("memfd"), shape(300));
        assert!(matches!(lie, Err(ViewError::Short { .. })), "{lie:?}");
    }
}
