//! Workers of one kind learn from each other.
//!
//! A class is the model, the engine and the accelerator: what its workers differ in is mostly noise of few samples. Left alone, a
//! worker that has hardly computed yet is preferred or avoided for the luck of its first steps, and a prefill worker that was
//! never chosen keeps a prior for ever while its peers know better. So each worker's constants are drawn toward the mean of its
//! class until it has seen enough itself: with n samples of its own it counts n / (n + [`STRENGTH`]) by itself. A worker that is
//! really slower shows it within some dozen steps.
//!
//! Costs are linear in the constants, so the mean of constants is the mean of predictions at every size. The form is that of an
//! empirical-Bayes shrinkage estimator (Efron and Morris, 1975), with the strength fixed instead of estimated.

use crate::coefficients::WorkerCoefficients;

/// Own samples at which a worker counts as much as its class.
const STRENGTH: f64 = 50.0;
/// A prior counts as so many samples in the mean of its class.
const PRIOR: f64 = 1.0;

/// Constants of one phase, in the order of the fields.
type Part<const N: usize> = [f64; N];

fn prefill(of: &WorkerCoefficients) -> (Part<4>, u64) {
    ([of.a, of.b, of.k, of.floor], of.samples.prefill)
}

fn decode(of: &WorkerCoefficients) -> (Part<3>, u64) {
    ([of.d0, of.d1, of.d2], of.samples.decode)
}

fn drawn<const N: usize>(class: &[(Part<N>, u64)], own: &(Part<N>, u64)) -> Part<N> {
    let weight = |samples: u64| samples as f64 + PRIOR;
    let total: f64 = class.iter().map(|(_, samples)| weight(*samples)).sum();
    let share = own.1 as f64 / (own.1 as f64 + STRENGTH);
    std::array::from_fn(|index| {
        let mean = class
            .iter()
            .map(|(values, samples)| weight(*samples) * values[index])
            .sum::<f64>()
            / total;
        share * own.0[index] + (1.0 - share) * mean
    })
}

/// The constants of each worker of one class, drawn toward their mean. Upper factors and sample counts stay each worker's own.
pub fn shared(class: &[WorkerCoefficients]) -> Vec<WorkerCoefficients> {
    let prefills: Vec<_> = class.iter().map(prefill).collect();
    let decodes: Vec<_> = class.iter().map(decode).collect();
    class
        .iter()
        .zip(prefills.iter().zip(&decodes))
        .map(|(own, (own_prefill, own_decode))| {
            let [a, b, k, floor] = drawn(&prefills, own_prefill);
            let [d0, d1, d2] = drawn(&decodes, own_decode);
            WorkerCoefficients {
                a,
                b,
                k,
                floor,
                d0,
                d1,
                d2,
                ..*own
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coefficients::{PhaseFactors, PhaseSamples};

    fn worker(b: f64, d0: f64, prefill: u64, decode: u64) -> WorkerCoefficients {
        WorkerCoefficients {
            a: 1.0,
            b,
            k: 0.0,
            floor: 0.0,
            d0,
            d1: 0.0,
            d2: 0.0,
            upper: PhaseFactors::default(),
            samples: PhaseSamples { prefill, decode },
        }
    }

    #[test]
    fn a_worker_that_has_computed_nothing_is_taken_for_its_peers() {
        let class = shared(&[worker(8.0, 20.0, 0, 0), worker(4.0, 20.0, 99, 0)]);
        assert!((class[0].b - 4.0).abs() < 0.1, "{}", class[0].b);
        assert_eq!(class[0].samples, PhaseSamples::default());
    }

    #[test]
    fn first_steps_hardly_tell_workers_apart_and_many_do() {
        let few = shared(&[worker(8.0, 20.0, 2, 0), worker(4.0, 20.0, 2, 0)]);
        assert!(few[0].b / few[1].b < 1.1, "{} {}", few[0].b, few[1].b);
        let many = shared(&[worker(8.0, 20.0, 2_000, 0), worker(4.0, 20.0, 2_000, 0)]);
        assert!(many[0].b / many[1].b > 1.8, "{} {}", many[0].b, many[1].b);
    }

    #[test]
    fn each_phase_counts_its_own_samples() {
        let class = shared(&[worker(8.0, 20.0, 1_000, 0), worker(4.0, 10.0, 0, 1_000)]);
        assert!(class[1].b > 7.5, "the prefill worker knows prefill");
        assert!(class[0].d0 < 10.5, "the decode worker knows decode");
    }

    #[test]
    fn equal_workers_stay_as_they_are() {
        let class = [worker(4.0, 20.0, 7, 3); 3];
        for (before, after) in class.iter().zip(shared(&class)) {
            assert!((before.b - after.b).abs() < 1e-12);
            assert!((before.d0 - after.d0).abs() < 1e-12);
        }
    }
}
