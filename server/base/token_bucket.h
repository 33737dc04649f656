// A bucket that fills at a steady rate and from which each event takes one token: so many events at once, and so many a
// second in the long run. A value, without a clock of its own; not thread-safe.
#pragma once

#include <algorithm>

namespace ballast {

class TokenBucket {
 public:
  struct Rate {
    double per_second;
    double at_once;  // the most that the bucket holds, as it does at first
  };

  // Takes a token. False: there is none, and nothing is taken.
  bool Take(Rate rate, double now_s) {
    const bool has = WaitS(rate, now_s) <= 0;
    if (has) ++used_;
    return has;
  }
  // Takes one if there is any.
  void Charge(Rate rate, double now_s) {
    Fill(rate, now_s);
    used_ = std::min(used_ + 1, rate.at_once);
  }
  // How long until there is a token; 0 or less: there is one.
  double WaitS(Rate rate, double now_s) {
    Fill(rate, now_s);
    return (used_ + 1 - rate.at_once) / rate.per_second;
  }
  bool Full(Rate rate, double now_s) {
    Fill(rate, now_s);
    return used_ == 0;
  }

 private:
  void Fill(Rate rate, double now_s) {
    used_ = std::max(0.0, used_ - std::max(0.0, now_s - at_s_) * rate.per_second);
    at_s_ = now_s;
  }

  double used_ = 0, at_s_ = 0;
};

}  // namespace ballast
