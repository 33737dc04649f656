// The rules, an element at a time, from their papers and torch's conventions, in double with a bound on what fp32 makes
// of it. Shares nothing with kernels/. Collage, which is exact in bf16, has its own file.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>

#include "tests/oracle/rounded.h"

namespace ballast::oracle {

struct Hypers {
  double lr = 0, weight_decay = 0, beta1 = 0, beta2 = 0, eps = 0;
  double momentum = 0, dampening = 0, nesterov = 0, lr_peak = 0;
};

// An element before a step, and after it.
struct Element {
  Rounded weight, m, v;
};
struct Stepped {
  Rounded weight, m, v;
  Rounded wanted;    // change of the weight
  Rounded rms_term;  // the square of the step, in units of lr, that g alone would ask for
};
// What the whole tensor says to each element: StableAdamW's mean of the rms terms.
struct TensorMean {
  Rounded rms_term;
};

inline double Power(double b, uint64_t t) { return std::pow(b, static_cast<double>(t)); }

// Decoupled decay is wd lr, or wd lr / lr_peak where that is given.
inline double Decay(const Hypers& h, double lr) { return h.weight_decay * (h.lr_peak > 0 ? lr / h.lr_peak : lr); }

// Moments by constants b1, b2 for the gradient g.
inline void Average(double b1, double b2, Rounded g, const Element& e, Stepped* s) {
  s->m = Constant(b1) * e.m + Constant(1 - b1) * g;
  s->v = Constant(b2) * e.v + Constant(1 - b2) * (g * g);
}

// g^2 / max(v debias, eps^2) of the raw gradient.
inline Rounded RmsTerm(Rounded raw, Rounded v_hat, double eps) {
  const Rounded floor = Constant(std::max(eps * eps, 0x1p-126));
  return raw * raw / Max(v_hat, floor);
}

// Weight and wanted change for a step -step with decay `decay`.
inline void Move(Rounded step, Rounded decay, const Element& e, Stepped* s) {
  s->wanted = Exact(0) - e.weight * decay - step;
  s->weight = e.weight + s->wanted;
}

// Loshchilov and Hutter, arXiv 1711.05101, as torch has it; `adam` (L2): the decay is part of the gradient.
inline Stepped AdamStep(const Hypers& h, bool decoupled, double gradient, uint64_t t, const Element& e) {
  Stepped s;
  const Rounded raw = Exact(gradient);
  const Rounded g = decoupled ? raw : Constant(h.weight_decay) * e.weight + raw;
  Average(h.beta1, h.beta2, g, e, &s);
  const double debias1 = 1 - Power(h.beta1, t), debias2 = 1 - Power(h.beta2, t);
  const Rounded inverse = Exact(1) / (Sqrt(s.v) * Constant(1 / std::sqrt(debias2)) + Constant(h.eps));
  const double decay = decoupled ? Decay(h, h.lr) : 0;
  Move(Constant(h.lr / debias1) * (s.m * inverse), Constant(decay), e, &s);
  s.rms_term = raw * inverse * (raw * inverse);
  return s;
}

// Wortsman et al., arXiv 2304.13013, algorithm 2: betas debiased, then lr held to the mean of the rms terms.
inline double DebiasedBeta(double beta, uint64_t t) { return beta * (1 - Power(beta, t - 1)) / (1 - Power(beta, t)); }
inline Stepped StableAdamWMoments(const Hypers& h, double gradient, uint64_t t, const Element& e) {
  Stepped s;
  Average(DebiasedBeta(h.beta1, t), DebiasedBeta(h.beta2, t), Exact(gradient), e, &s);
  s.rms_term = RmsTerm(Exact(gradient), s.v, h.eps);
  return s;
}
inline Stepped StableAdamWStep(const Hypers& h, double gradient, uint64_t t, const Element& e, TensorMean mean) {
  Stepped s = StableAdamWMoments(h, gradient, t, e);
  const Rounded rms = Sqrt(mean.rms_term);
  const Rounded lr = Constant(h.lr) / Max(Exact(1), rms);
  const Rounded decay = lr * Constant(Decay(h, 1));
  Move(lr * (s.m / (Sqrt(s.v) + Constant(h.eps))), decay, e, &s);
  return s;
}

// torch.optim.SGD: the first buffer is the gradient, whatever the dampening; without momentum there is no buffer.
inline Stepped SgdStep(const Hypers& h, bool decoupled, double gradient, uint64_t t, const Element& e) {
  Stepped s;
  const Rounded raw = Exact(gradient);
  const Rounded g = decoupled ? raw : Constant(h.weight_decay) * e.weight + raw;
  s.m = t == 1 || h.momentum == 0 ? g : Constant(h.momentum) * e.m + Constant(1 - h.dampening) * g;
  const Rounded direction = h.nesterov != 0 ? g + Constant(h.momentum) * s.m : s.m;
  const double decay = decoupled ? Decay(h, h.lr) : 0;
  Move(Constant(h.lr) * direction, Constant(decay), e, &s);
  return s;
}

// Chen et al., arXiv 2302.06675.
inline Stepped LionStep(const Hypers& h, double gradient, const Element& e) {
  Stepped s;
  const Rounded g = Exact(gradient);
  const Rounded u = Sign(Constant(h.beta1) * e.m + Constant(1 - h.beta1) * g);
  s.m = Constant(h.beta2) * e.m + Constant(1 - h.beta2) * g;
  const double decay = Decay(h, h.lr);
  Move(Constant(h.lr) * u, Constant(decay), e, &s);
  return s;
}

// torch.optim.Muon before its direction is made orthogonal, which is of a whole matrix. Rounded to bf16, where it may be
// one of two numbers.
inline Stepped MuonStep(const Hypers& h, double gradient, const Element& e) {
  Stepped s;
  const Rounded g = Exact(gradient), rest = Constant(1 - h.momentum) * g;
  s.m = Constant(h.momentum) * e.m + rest;
  const Rounded u = h.nesterov != 0 ? Constant(h.momentum) * s.m + rest : s.m;
  const double low = Nearest(u.value - u.error, kBf16), high = Nearest(u.value + u.error, kBf16);
  Move(Constant(h.lr) * Rounded{(low + high) / 2, (high - low) / 2}, Constant(Decay(h, h.lr)), e, &s);
  return s;
}

inline Stepped Step(std::string_view rule, const Hypers& h, double g, uint64_t t, const Element& e, TensorMean mean) {
  if (rule == "stable_adamw") return StableAdamWStep(h, g, t, e, mean);
  if (rule == "sgd" || rule == "sgdw") return SgdStep(h, rule == "sgdw", g, t, e);
  if (rule == "lion") return LionStep(h, g, e);
  if (rule == "muon") return MuonStep(h, g, e);
  return AdamStep(h, rule == "adamw", g, t, e);
}

}  // namespace ballast::oracle
