// What routers choose, on the numbers of one token: the largest numbers of a row, numbers at indices, numbers put there. An index is a
// number in fp32 like any other; one that is outside a row, or no number, counts as the nearest.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tokenwise.h"

namespace choices {

inline int64_t index_at(const tokenwise::Row& indices, int64_t c, int64_t count) {
  const float index = indices.one(c);
  return index >= 0 ? index < float(count) ? std::min<int64_t>(int64_t(index), count - 1) : count - 1 : 0;  // infinite, too
}

// Whether a stands before b, whose index is the lower one: larger, or no number
inline bool precedes(float a, float b) { return a > b || (a != a && b == b); }

// The op.cols largest of each row's numbers, by insertion into what was found so far
inline void top(const Op& op, const char* const* in, char* out) {
  const int64_t count = int64_t(op.numbers[0]), wanted = op.cols;
  thread_local std::vector<float> numbers;
  thread_local std::vector<int64_t> indices;
  numbers.resize(wanted);
  indices.resize(wanted);
  for (int64_t r = 0; r < op.rows; ++r) {
    const tokenwise::Row from = tokenwise::row_of(op.in[0], in[0], r), to = tokenwise::row_of(op.out, out, r);
    int64_t found = 0;
    for (int64_t c = 0; c < count; ++c) {
      const float number = from.one(c);
      if (found == wanted && !precedes(number, numbers[found - 1])) continue;
      int64_t place = found < wanted ? found++ : found - 1;
      for (; place > 0 && precedes(number, numbers[place - 1]); --place) {
        numbers[place] = numbers[place - 1];
        indices[place] = indices[place - 1];
      }
      numbers[place] = number;
      indices[place] = c;
    }
    for (int64_t i = 0; i < wanted; ++i) to.write_one(i, float(indices[i]));
  }
}

inline void take(const Op& op, const char* const* in, char* out) {
  for (int64_t r = 0; r < op.rows; ++r) {
    const tokenwise::Row from = tokenwise::row_of(op.in[0], in[0], r), at = tokenwise::row_of(op.in[1], in[1], r);
    const tokenwise::Row to = tokenwise::row_of(op.out, out, r);
    const int64_t count = int64_t(op.numbers[0]);
    for (int64_t c = 0; c < op.cols; ++c) to.write_one(c, from.one(index_at(at, c, count)));
  }
}

inline void put(const Op& op, const char* const* in, char* out) {
  for (int64_t r = 0; r < op.rows; ++r) {
    const tokenwise::Row from = tokenwise::row_of(op.in[0], in[0], r), at = tokenwise::row_of(op.in[1], in[1], r);
    const tokenwise::Row numbers = tokenwise::row_of(op.in[2], in[2], r), to = tokenwise::row_of(op.out, out, r);
    for (int64_t c = 0; c < op.cols; ++c) to.write_one(c, from.one(c));
    for (int64_t i = 0; i < int64_t(op.numbers[0]); ++i) to.write_one(index_at(at, i, op.cols), numbers.one(i));
  }
}

}  // namespace choices
