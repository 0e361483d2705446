//! Host: the instruction set that computes, found at run time.

use crate::lanes::Lanes;
#[cfg(target_arch = "x86_64")]
use crate::lanes::avx512::Avx512;
use crate::lanes::portable::Portable;

/// An instruction set that this processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host(Path);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
}

/// Something to compute, written once for all instruction sets.
pub(crate) trait Task {
    type Output;
    /// To be `#[inline(always)]`, with all that it calls: only what is inlined is compiled for the instruction set.
    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}

impl Host {
    /// The fastest one that the processor has.
    pub fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(lanes) = Avx512::detect() {
            return Self(Path::Avx512(lanes));
        }
        Self::portable()
    }

    /// What the crate was compiled for, on any processor.
    pub fn portable() -> Self {
        Self(Path::Portable)
    }

    /// All that the processor has: for tests that compare them.
    pub fn all() -> Vec<Self> {
        let mut all = vec![Self::portable(), Self::best()];
        all.dedup();
        all
    }

    /// For logs and benchmarks.
    pub fn name(self) -> &'static str {
        match self.0 {
            Path::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Path::Avx512(_) => "avx512-vnni",
        }
    }

    /// Whether there are registers for twelve rows at a time.
    pub(crate) fn is_wide(self) -> bool {
        match self.0 {
            Path::Portable => Portable::WIDE,
            #[cfg(target_arch = "x86_64")]
            Path::Avx512(_) => Avx512::WIDE,
        }
    }

    #[inline]
    pub(crate) fn run<T: Task>(self, task: T) -> T::Output {
        match self.0 {
            Path::Portable => task.run(Portable),
            #[cfg(target_arch = "x86_64")]
            Path::Avx512(lanes) => lanes.run(task),
        }
    }
}
