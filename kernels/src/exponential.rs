//! e^x to about one unit in the last place, the same on every instruction set.

use crate::lanes::Lanes;

/// Adding this to a number of modest size leaves its nearest whole number in the lowest bits: 1.5 · 2^23.
const WHOLE: f32 = 12_582_912.0;
/// Above, e^x would soon be infinite.
const HIGHEST: f32 = 88.0;
/// Below, e^x is smaller than what adds to anything: 0.
const LOWEST: f32 = -87.0;

// ln 2 in two parts, the first exact in few bits, and the polynomial of Cephes' expf.
const LN_2_FIRST: f32 = 0.693_359_4;
const LN_2_REST: f32 = -2.121_944_4e-4;
const COEFFICIENTS: [f32; 6] = [
    1.987_569_1e-4,
    1.398_199_9e-3,
    8.333_452e-3,
    4.166_579_6e-2,
    1.666_666_5e-1,
    5.0e-1,
];

/// e^x; 0 below -87 (also of minus infinity), e^88 above 88.
#[inline(always)]
pub(crate) fn exponential<L: Lanes>(lanes: L, values: L::Floats) -> L::Floats {
    let bounded = lanes.lowest(values, lanes.splat(HIGHEST));
    // e^x = 2^n · e^r with n the nearest whole number of x / ln 2.
    let shifted = lanes.fused(
        bounded,
        lanes.splat(std::f32::consts::LOG2_E),
        lanes.splat(WHOLE),
    );
    let whole = lanes.subtract(shifted, lanes.splat(WHOLE));
    let rest = lanes.fused(whole, lanes.splat(-LN_2_FIRST), bounded);
    let rest = lanes.fused(whole, lanes.splat(-LN_2_REST), rest);
    let mut sum = lanes.splat(COEFFICIENTS[0]);
    for coefficient in &COEFFICIENTS[1..] {
        sum = lanes.fused(sum, rest, lanes.splat(*coefficient));
    }
    let square = lanes.multiply(rest, rest);
    let sum = lanes.fused(sum, square, lanes.add(rest, lanes.splat(1.0)));
    let result = lanes.multiply(sum, lanes.exponent(shifted));
    lanes.zero_below(values, LOWEST, result)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LANES;
    use crate::host::{Host, Task};

    struct Exponential([f32; LANES]);

    impl Task for Exponential {
        type Output = [f32; LANES];

        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) -> [f32; LANES] {
            lanes.array(exponential(lanes, lanes.load(&self.0)))
        }
    }

    #[test]
    fn it_is_e_to_the_x_and_the_same_bits_everywhere() {
        for step in -1_400_i16..1_420 {
            let values = std::array::from_fn(|lane| f32::from(step) / 16.0 + lane as f32 / 256.0);
            let found = Host::portable().run(Exponential(values));
            for host in Host::all() {
                assert_eq!(
                    host.run(Exponential(values)).map(f32::to_bits),
                    found.map(f32::to_bits)
                );
            }
            for (value, found) in values.into_iter().zip(found) {
                let expected = f64::from(value.min(HIGHEST)).exp();
                if value < LOWEST {
                    assert_eq!(found, 0.0, "e^{value}");
                } else {
                    let error = (f64::from(found) / expected - 1.0).abs();
                    assert!(error < 3e-7, "e^{value} is {found}, off by {error:e}");
                }
            }
        }
        let edges = [f32::NEG_INFINITY, f32::INFINITY, -1e30, 1e30];
        let found = Host::best().run(Exponential(std::array::from_fn(|lane| edges[lane % 4])));
        assert_eq!(found[0], 0.0);
        assert_eq!(found[2], 0.0);
        assert!(found[1] == found[3] && found[1].is_finite() && found[1] > 1e38);
    }
}
