// The least a test program needs: a check that says where and what, and ends the program.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (false)

#define CHECK_EQ(left, right)                                                            \
  do {                                                                                   \
    const auto left_value = (left);                                                      \
    const auto right_value = (right);                                                    \
    if (!(left_value == right_value)) {                                                  \
      std::fprintf(stderr, "%s:%d: %s is %lld, %s is %lld\n", __FILE__, __LINE__, #left, \
                   static_cast<long long>(left_value), #right,                           \
                   static_cast<long long>(right_value));                                 \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (false)
