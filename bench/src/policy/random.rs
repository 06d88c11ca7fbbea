//! Random numbers by the Mersenne Twister, drawn in the order in which Python's `random` module
//! draws them, so that the simulation can be compared number by number with a model in Python.

use rand_mt::Mt;

/// A generator.
pub struct Random(Mt);

impl Random {
    /// As `random.Random(seed)`.
    pub fn new(seed: u32) -> Self {
        Random(Mt::new_with_key([seed]))
    }

    /// In [0, 1), with 53 bits.
    pub fn uniform(&mut self) -> f64 {
        let high = f64::from(self.0.next_u32() >> 5);
        let low = f64::from(self.0.next_u32() >> 6);
        (high * 67_108_864.0 + low) / 9_007_199_254_740_992.0
    }

    /// Exponential, of the given mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -(1.0 - self.uniform()).ln() / (1.0 / mean)
    }

    /// Gamma of shape `alpha` above 1 and scale `beta`, by R. C. H. Cheng's rejection (Applied
    /// Statistics 26, 1977).
    pub fn gamma(&mut self, alpha: f64, beta: f64) -> f64 {
        // ln 4, and 1 + ln 4.5.
        const LN_4: f64 = 2.0 * std::f64::consts::LN_2;
        let quick_bound = 1.0 + 4.5_f64.ln();
        let a = (2.0 * alpha - 1.0).sqrt();
        let (b, c) = (alpha - LN_4, alpha + a);
        loop {
            let u = self.uniform();
            if !(1e-7..0.999_999_9).contains(&u) {
                continue;
            }
            let other = 1.0 - self.uniform();
            let v = (u / (1.0 - u)).ln() / a;
            let x = alpha * v.exp();
            let z = u * u * other;
            let r = b + c * v - x;
            if r + quick_bound - 4.5 * z >= 0.0 || r >= z.ln() {
                return x * beta;
            }
        }
    }
}
