//! Memory that another process of this host can map: an arena of equal pieces with a header beside each.
//!
//! The owner has one writable mapping, cut into [`Piece`]s that own their bytes as a box would. Its file is sealed: it never
//! changes its size, and nobody maps it writable again. A reader has a [`view::View`], read-only. Where such a file cannot be
//! made the arena is private memory, and [`Arena::file`] says why.
#![allow(unsafe_code)]

#[cfg(test)]
mod cells;
pub mod header;
#[cfg(test)]
mod orders;
pub mod view;

/// What `header` stands on. The checker in `orders` compiles that file once more, over its own.
mod atomic {
    pub(super) use std::sync::atomic::{AtomicU64, Ordering, fence};
}

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use self::header::Cell;

/// Pieces begin at multiples of this, so that vectors and cache lines do not straddle two of them.
const ALIGNMENT: usize = 64;
/// The smallest page there is: pieces begin on one.
const PAGE: usize = 4096;
/// From this size on huge pages are asked for. Below, half of one would lie idle.
const HUGE: usize = 4 << 20;

/// How an arena lies in its file: a header for each piece, then, from a page's begin, the pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pieces: u32,
    piece_bytes: usize,
    stride: usize,
    begin: usize,
    total: usize,
}

impl Shape {
    /// Of `pieces` pieces of `piece_bytes` bytes. `None` when there are none, or more than can be addressed.
    pub fn new(pieces: u32, piece_bytes: usize) -> Option<Self> {
        if pieces == 0 || piece_bytes == 0 {
            return None;
        }
        let stride = piece_bytes.checked_next_multiple_of(ALIGNMENT)?;
        let headers = size_of::<Cell>().checked_mul(pieces as usize)?;
        let begin = headers.checked_next_multiple_of(PAGE)?;
        let total = stride
            .checked_mul(pieces as usize)?
            .checked_add(begin)?
            .checked_next_multiple_of(PAGE)?;
        isize::try_from(total).ok()?;
        Some(Self {
            pieces,
            piece_bytes,
            stride,
            begin,
            total,
        })
    }

    /// Number of pieces.
    pub fn pieces(&self) -> u32 {
        self.pieces
    }

    /// Bytes of one piece.
    pub fn piece_bytes(&self) -> usize {
        self.piece_bytes
    }

    /// Bytes of the file.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Where the header of a piece lies.
    fn header_at(&self, index: u32) -> Option<usize> {
        (index < self.pieces).then(|| index as usize * size_of::<Cell>())
    }

    /// Where a piece lies.
    fn piece_at(&self, index: u32) -> Option<usize> {
        (index < self.pieces).then(|| self.begin + index as usize * self.stride)
    }
}

/// Mapped pages; unmapped with the last owner.
struct Mapping {
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping is an address range of the process, valid from every thread until it is dropped. What is done with its bytes
// is argued where they are touched.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`: shared access to a `Mapping` reads nothing but its address and length.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn shared(file: BorrowedFd<'_>, bytes: usize, protection: ProtFlags) -> io::Result<Self> {
        // SAFETY: a null hint lets the kernel choose a range that nothing else uses.
        let address = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                protection,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        Self::new(address.cast(), bytes)
    }

    fn private(bytes: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: as in `shared`.
        let address =
            unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) }?;
        Self::new(address.cast(), bytes)
    }

    fn new(address: *mut u8, bytes: usize) -> io::Result<Self> {
        let address = NonNull::new(address).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapping = Self { address, bytes };
        if bytes >= HUGE {
            // SAFETY: the range is the mapping's own, and this advice changes no contents. Refused, pages stay small.
            let _ = unsafe { madvise(address.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
        }
        Ok(mapping)
    }

    /// A header within the mapping.
    fn cell(&self, at: usize) -> &Cell {
        debug_assert!(at.is_multiple_of(size_of::<Cell>()) && at + size_of::<Cell>() <= self.bytes);
        // SAFETY: `Shape` put the cell within the mapping, at a multiple of its size, and zero pages are cells. They are atomics, which
        // several processes may touch; those that map them read-only load only.
        unsafe { self.address.add(at).cast::<Cell>().as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by this value and everything that points into it holds this value.
        let _ = unsafe { munmap(self.address.as_ptr().cast(), self.bytes) };
    }
}

/// The bytes of one piece. Its only owner, as of a `Box<[u8]>`.
pub struct Piece {
    mapping: Arc<Mapping>,
    at: usize,
    bytes: usize,
}

impl fmt::Debug for Piece {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Piece")
            .field("at", &self.at)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl Piece {
    /// Aligned to 64 bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `Arena::new` made one piece for this range of a live, zeroed mapping and gave it to nobody else. Other processes
        // cannot map it writable (sealed), so that it changes only through `bytes_mut`, which takes `self` exclusively.
        unsafe {
            std::slice::from_raw_parts(self.mapping.address.add(self.at).as_ptr(), self.bytes)
        }
    }

    /// To be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`; `self` is borrowed exclusively. Readers in other processes may see half of a change: their headers
        // tell them (`header`).
        unsafe {
            std::slice::from_raw_parts_mut(self.mapping.address.add(self.at).as_ptr(), self.bytes)
        }
    }
}

/// The headers of an arena, and its file. The pieces are handed out when it is made.
pub struct Arena {
    mapping: Arc<Mapping>,
    shape: Shape,
    file: Result<OwnedFd, String>,
}

impl fmt::Debug for Arena {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Arena")
            .field("shape", &self.shape)
            .field("file", &self.file)
            .finish_non_exhaustive()
    }
}

impl Arena {
    /// Zeroed memory for all pieces; pages are taken when they are first written.
    ///
    /// # Errors
    /// What the system says when it has no such range of addresses.
    pub fn new(shape: Shape) -> io::Result<(Self, Vec<Piece>)> {
        let (mapping, file) = match sealed(shape.total) {
            Ok((mapping, file)) => (mapping, Ok(file)),
            Err(reason) => (Mapping::private(shape.total)?, Err(reason)),
        };
        Ok(Self::cut(mapping, file, shape))
    }

    /// Without a file, for machines that have none, and for tests of what follows from that.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn private(shape: Shape, reason: &str) -> io::Result<(Self, Vec<Piece>)> {
        let mapping = Mapping::private(shape.total)?;
        Ok(Self::cut(mapping, Err(reason.to_owned()), shape))
    }

    fn cut(mapping: Mapping, file: Result<OwnedFd, String>, shape: Shape) -> (Self, Vec<Piece>) {
        let mapping = Arc::new(mapping);
        let pieces = (0..shape.pieces)
            .filter_map(|index| {
                Some(Piece {
                    mapping: Arc::clone(&mapping),
                    at: shape.piece_at(index)?,
                    bytes: shape.piece_bytes,
                })
            })
            .collect();
        let arena = Self {
            mapping,
            shape,
            file,
        };
        (arena, pieces)
    }

    /// How it lies in its file.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// What a reader maps, or why there is nothing to map.
    ///
    /// # Errors
    /// The step that failed when the arena was made, in words.
    pub fn file(&self) -> Result<BorrowedFd<'_>, &str> {
        match &self.file {
            Ok(file) => Ok(file.as_fd()),
            Err(reason) => Err(reason),
        }
    }

    /// The header beside a piece. `None` when there is no such piece.
    pub fn header(&self, index: u32) -> Option<&Cell> {
        self.shape.header_at(index).map(|at| self.mapping.cell(at))
    }
}

/// A file of that size, mapped, and sealed so that its size stays and no other mapping can write it.
fn sealed(bytes: usize) -> Result<(Mapping, OwnedFd), String> {
    let step = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
    let file = memfd_create("baton-kv", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(|error| step("memfd_create")(error.into()))?;
    ftruncate(&file, bytes as u64).map_err(|error| step("ftruncate")(error.into()))?;
    let mapping = Mapping::shared(file.as_fd(), bytes, ProtFlags::READ | ProtFlags::WRITE)
        .map_err(step("mmap"))?;
    // After the one writable mapping: it stays, others are refused from now on.
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    fcntl_add_seals(&file, seals).map_err(|error| step("sealing")(error.into()))?;
    Ok((mapping, file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_that_cannot_be_are_none() {
        assert_eq!(Shape::new(0, 64), None);
        assert_eq!(Shape::new(4, 0), None);
        assert_eq!(Shape::new(u32::MAX, usize::MAX / 2), None);
        assert_eq!(Shape::new(2, usize::MAX - 8), None);
        let shape = Shape::new(65, 100).expect("small");
        assert_eq!(shape.piece_at(64), Some(8192 + 64 * 128));
        assert_eq!((shape.piece_at(65), shape.header_at(65)), (None, None));
        assert!(shape.piece_at(64).expect("there") + 100 <= shape.total());
    }

    #[test]
    fn pieces_are_zero_apart_and_aligned() {
        let (arena, mut pieces) = Arena::new(Shape::new(3, 100).expect("small")).expect("memory");
        assert!(pieces.iter().all(|piece| piece.bytes() == [0; 100]));
        pieces[1].bytes_mut().fill(7);
        assert_eq!(pieces[0].bytes(), [0; 100]);
        assert_eq!(pieces[2].bytes(), [0; 100]);
        for piece in &pieces {
            assert_eq!(piece.bytes().as_ptr() as usize % ALIGNMENT, 0);
        }
        drop(arena);
        assert_eq!(pieces[1].bytes(), [7; 100], "a piece keeps its memory");
    }

    #[test]
    fn the_file_neither_shrinks_nor_is_mapped_writable_again() {
        let (arena, _pieces) = Arena::new(Shape::new(3, 100).expect("small")).expect("memory");
        let file = arena.file().expect("a machine with memfd");
        assert!(ftruncate(file, 0).is_err());
        assert!(Mapping::shared(file, 4096, ProtFlags::READ | ProtFlags::WRITE).is_err());
    }
}
